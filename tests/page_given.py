"""Names that a page of documentation takes as given: Python code that makes them before the page's first block.

Every other name must be made by a block of the page.
"""

from __future__ import annotations

from pages import ENGINES

_ATTENTION = """
import peft as _peft, transformers as _transformers
_model = _transformers.AutoModelForCausalLM.from_pretrained("Qwen3-30B-A3B")
_peft.get_peft_model(_model, _peft.LoraConfig(target_modules=["q_proj", "v_proj"])).save_pretrained("ATTENTION")
"""
#: Page -> environment -> code.
GIVEN: dict[str, dict[str, str]] = {"docs/adapters.md": {ENGINES: _ATTENTION}}


def given(page: str, environment: str) -> str:
    """The code that runs before a page's first block."""
    return GIVEN.get(page, {}).get(environment, "")
