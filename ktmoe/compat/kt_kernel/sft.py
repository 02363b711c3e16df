"""kt_kernel.sft: the wrapper for fine-tuning by the names that callers import. There are none of kt-kernel's torch layers."""

from ktmoe.compat.sft import SFTWrapper

#: The class of KTMoEWrapper(mode="sft"), and what that is derived from in kt-kernel.
AMXSFTMoEWrapper = BaseSFTMoEWrapper = SFTWrapper

__all__ = ["AMXSFTMoEWrapper", "BaseSFTMoEWrapper"]
