"""`--environment-options` of `--environment kubernetes`, checked before anything is registered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steno.contracts.errors import ConfigError
from steno_rollouts.trials.harbor.kubernetes.pods.manifest import refused, without_kind

_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
"""Of an object of Kubernetes."""
_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
"""Of a label."""
FIELD = "environment_options"


class KubernetesOptions(BaseModel):
    """Attributes: template: of pods, read from its file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    namespace: str | None = Field(None, pattern=_NAME)
    kubeconfig: str | None = None
    context: str | None = None
    template: dict[str, Any] = Field(default_factory=dict)
    node_selector: dict[str, str] = Field(default_factory=dict)
    image_pull_secrets: list[str] = Field(default_factory=list)
    queue: str | None = Field(None, pattern=_VALUE, min_length=1)
    cpus: float | None = Field(None, ge=0.01, allow_inf_nan=False)
    memory_mb: int | None = Field(None, ge=16)
    deadline_s: int = Field(86400, ge=60, le=2**31 - 1)
    start_timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    image_timeout_s: float = Field(60.0, ge=0, allow_inf_nan=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Raises: ConfigError: names the option, what it is, and what it must be."""
        values = dict(given)
        if "template" in values:
            values["template"] = _template(values["template"])
        try:
            found = cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_explained(error), field=FIELD) from None
        if found.kubeconfig is not None and not Path(found.kubeconfig).is_file():
            raise ConfigError(f"{FIELD}: kubeconfig: got {found.kubeconfig!r}: no such file", field=FIELD)
        return found

    @property
    def where(self) -> dict[str, Any]:
        """The cluster, as `Api` is told."""
        file = None if self.kubeconfig is None else str(Path(self.kubeconfig).absolute())
        return {"kubeconfig": file, "context": self.context, "namespace": self.namespace}


def _explained(error: ValidationError) -> str:
    found = error.errors()[0]
    name = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden":
        allowed = ", ".join(sorted(KubernetesOptions.model_fields))
        return f"{FIELD}: {name}: unknown with environment kubernetes, must be one of {allowed}"
    return f"{FIELD}: {name}: got {found['input']!r}: {found['msg']}"


def _template(given: Any) -> dict[str, Any]:
    """Raises: ConfigError."""
    where = f"{FIELD}: template"
    if not isinstance(given, str):
        raise ConfigError(f"{where}: got {given!r}, must be the path of a file", field=FIELD)
    try:
        found = yaml.safe_load(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{where}: {given}: not YAML or JSON, or not readable: {said}", field=FIELD) from None
    if (why := refused(found)) is not None:
        raise ConfigError(f"{where}: {given}: {why}", field=FIELD)
    return without_kind(found)
