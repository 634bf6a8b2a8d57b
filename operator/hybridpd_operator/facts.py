"""Which facts about the model a service brings: its own config.json, else the catalogue, else none.

Pure: whoever reads ConfigMaps passes their content in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hybridpd_geometry import (
    GeometryError,
    ModelFacts,
    UnknownModelError,
    UnsupportedModelError,
    facts_from_config,
)
from hybridpd_operator import catalogue
from hybridpd_operator.problems import BAD_MODEL_CONFIG, UNSUPPORTED_MODEL, Problem
from hybridpd_operator.spec import Model

INLINE: Final = "Inline"
CONFIG_MAP: Final = "ConfigMap"
CATALOGUE: Final = "Catalogue"


@dataclass(frozen=True)
class Facts:
    """What is known about the model, and from where.

    `config` is the config.json that was used; None when there was none. `problems` says what is
    wrong with one that was given. `why_unknown` is a sentence when there are neither.
    """

    source: str | None = None
    config: Mapping[str, Any] | None = None
    problems: tuple[Problem, ...] = ()
    why_unknown: str = ""


def find_facts(
    model: Model, config: Mapping[str, Any] | None = None, config_problem: str = ""
) -> Facts:
    """The config.json to judge `model` by.

    `config` is the content of the key that `model.config.configMap` names, `config_problem` why
    it cannot be read. With neither, nobody could look: the model is unknown, not wrong.
    """
    given = model.config
    if given is not None and given.inline is not None:
        return Facts(INLINE, given.inline)
    if given is not None and given.config_map is not None:
        where = f"ConfigMap {given.config_map.name}, key {given.config_map.key}"
        if config_problem:
            bad = Problem(BAD_MODEL_CONFIG, "spec.model.config.configMap", config_problem)
            return Facts(problems=(bad,))
        if config is None:
            return Facts(why_unknown=f"{where} cannot be read from here; nothing was checked.")
        return Facts(CONFIG_MAP, config)
    known = catalogue.config_of(model.id)
    if known is not None:
        return Facts(CATALOGUE, known)
    return Facts(
        why_unknown=(
            f"The catalogue does not know {model.id}; give its config.json in spec.model.config "
            "to have the pair checked before it starts."
        )
    )


def model_facts(
    config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[ModelFacts | None, tuple[Problem, ...], str]:
    """(facts, problems, why unknown) of a config.json with `--hf-overrides` laid over it.

    A model type without a reader is unknown, not wrong; a config that contradicts itself is wrong,
    and so is a model whose cache is known not to be moved.
    """
    try:
        return facts_from_config(_laid_over(config, overrides)), (), ""
    except UnknownModelError as error:
        return None, (), f"{error.field} is {error.got}: {error.hint}"
    except UnsupportedModelError as error:
        text = f"{error}; serve this model by ordinary engines, or choose another".replace(
            ".;", ";"
        )
        return None, (Problem(UNSUPPORTED_MODEL, "spec.model.id", text),), ""
    except GeometryError as error:
        return None, (_bad(str(error)),), ""


def _laid_over(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """As vLLM does it: fields are replaced, those of the text model's config one by one."""
    text, over = config.get("text_config"), overrides.get("text_config")
    if isinstance(text, Mapping) and isinstance(over, Mapping):
        overrides = {**overrides, "text_config": {**text, **over}}
    return {**config, **overrides}


def _bad(message: str) -> Problem:
    return Problem(BAD_MODEL_CONFIG, "spec.model.config", message)
