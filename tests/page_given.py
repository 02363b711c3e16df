"""Names that a page of documentation takes as given: Python code that makes them before the page's first block.

Every other name must be made by a block of the page.
"""

from __future__ import annotations

from pages import CORE, ENGINES

_ATTENTION = """
import peft as _peft, transformers as _transformers
model = _transformers.AutoModelForCausalLM.from_pretrained("MODEL")
_peft.get_peft_model(model, _peft.LoraConfig(target_modules=["q_proj", "v_proj"])).save_pretrained("ATTENTION")
model = _transformers.AutoModelForCausalLM.from_pretrained("MODEL")
"""
#: Page -> environment -> code. Other environments also run that of the core.
GIVEN: dict[str, dict[str, str]] = {"docs/adapters.md": {ENGINES: _ATTENTION}}


def given(page: str, environment: str) -> str:
    """The code that runs before a page's first block."""
    code = GIVEN.get(page, {})
    return code.get(CORE, "") + (code.get(environment, "") if environment != CORE else "")
