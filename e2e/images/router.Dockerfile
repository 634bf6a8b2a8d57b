# vllm-router from PyPI. Nothing is fetched while it builds.
#
#   CONTEXT/app   pip install --target app vllm-router==0.1.17
#
#   buildah bud --build-arg BASE=python:3.11-slim -f e2e/images/router.Dockerfile CONTEXT
ARG BASE=python:3.11-slim
FROM ${BASE}
COPY app /app
ENV PYTHONPATH=/app PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp USER=hybridpd
WORKDIR /tmp
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["python3", "-m", "vllm_router.launch_router"]
