"""Tokens that llama.cpp knows by their texts, as files state few of them: see llama_vocab::impl::load()."""

from __future__ import annotations

#: What ends an answer, whatever its type is. llama.cpp has </s> here, too; in files of other models it is a normal token.
ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|endoftext|>"),
        *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<end_of_turn>"),
        *("<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
    )
)
#: What ends an answer where it is a control or a user-defined token.
CONTROL_ENDS = frozenset({"</s>"})
#: Tokens for filling in the middle of code that end an answer: padding, a repository's name, a file's end.
FILL_ENDS = frozenset(
    (
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>"),
        *("<reponame>", "<|file_sep|>"),
    )
)
_FILL = frozenset(
    (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "<|prefix|>", "<|suffix|>", "<|middle|>"),
    )
)
#: What llama.cpp takes for a control token, whatever its type is.
CONTROL_TEXTS = ENDS | FILL_ENDS | _FILL
