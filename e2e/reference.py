"""One ordinary engine on the same checkpoint: what the pair's tokens must equal.

It takes model, image, environment and volumes from the HybridPDService and nothing from the
operator, so that a fault of the operator's rendering cannot hide in both.
"""

from __future__ import annotations

import completions
import waits
from kubectl import Kubectl, Object

POD = "single-engine"
MODEL_FOLDER = "/model"
PORT = 8000
USER = 1000


def pod_of(service: Object) -> Object:
    """The pod of a single engine for a service whose engines run from folders of the node."""
    spec = service["spec"]
    volumes = [
        {"name": "model", "hostPath": {"path": spec["model"]["source"]["hostPath"]["path"]}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        *spec["prefill"]["podTemplate"]["spec"]["volumes"],
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD},
        "spec": {
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "containers": [_engine(spec)],
            "volumes": volumes,
        },
    }


def _engine(spec: Object) -> Object:
    model, template = spec["model"], spec["prefill"]["podTemplate"]["spec"]
    return {
        "name": "engine",
        "image": spec["engine"]["image"],
        "imagePullPolicy": spec["engine"]["imagePullPolicy"],
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": [
            f"--model={MODEL_FOLDER}",
            f"--served-model-name={model['servedName']}",
            f"--max-model-len={model['maxModelLen']}",
            f"--dtype={spec['engine']['dtype']}",
            f"--port={PORT}",
            "--no-enable-prefix-caching",
            *spec["engine"]["extraArgs"],
        ],
        "env": [
            *spec["engine"]["env"],
            {"name": "HOME", "value": "/tmp"},
            {"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"},
            {"name": "VLLM_SSM_CONV_STATE_LAYOUT", "value": "DS"},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": PORT},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
        },
        "securityContext": {
            "runAsUser": USER,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *template["containers"][0]["volumeMounts"],
        ],
    }


def answers(
    kubectl: Kubectl, service: Object, prompts: dict[str, str], max_tokens: int = 24
) -> dict[str, completions.Answer]:
    """Start the single engine, ask it every prompt, remove it; name → answer."""
    kubectl.delete("pod", POD, "--wait=true")
    kubectl.create(pod_of(service))
    try:
        waits.for_pod_ready(kubectl, POD)
        model = service["spec"]["model"]["servedName"]
        with completions.port_forward(kubectl, f"pod/{POD}", PORT) as url:
            return {
                name: completions.complete(url, model, prompt, max_tokens)
                for name, prompt in prompts.items()
            }
    finally:
        kubectl.delete("pod", POD)
