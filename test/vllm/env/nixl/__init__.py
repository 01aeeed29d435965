"""The name under which vLLM imports NIXL, for the wheel nixl-cu12, which calls itself nixl_cu12.

NIXL's own Python starts its progress thread without any pause: it takes a whole core in every idle engine. With
HEADRACE_NIXL_DELAY_US set, the thread pauses so long between two looks. What is measured says which value it ran with.
"""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

_bindings: Any = importlib.import_module("nixl_cu12._bindings")
_api: Any = importlib.import_module("nixl_cu12._api")
for _name, _module in (("_bindings", _bindings), ("_api", _api)):
    sys.modules[f"{__name__}.{_name}"] = _module

_delay = os.environ.get("HEADRACE_NIXL_DELAY_US")
if _delay:
    _pause = int(_delay)

    class _AgentConfig(_bindings.nixlAgentConfig):  # type: ignore[misc]
        """NIXL sets pthrDelay to 0 right after making one of these."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _pause if name == "pthrDelay" else value)

    _paced = ModuleType("nixl_cu12._bindings")
    _paced.__dict__.update(vars(_bindings))
    _paced.nixlAgentConfig = _AgentConfig  # type: ignore[attr-defined]
    _api.nixlBind = _paced
