"""Why a known parameter is refused, as the end of the sentence that refuses it."""

from __future__ import annotations

from typing import Final

WHY: Final[dict[str, str]] = {
    "length_penalty": "it belongs to beam search",
    "use_beam_search": "tokens are drawn or taken greedily; `best_of` compares whole answers",
    "watermarking": "no watermark is made",
    "logprob_token_ids": "`logprobs` gives the likeliest tokens",
    "logits_processors": "code of clients is not run; `logit_bias`, `bad_words` and `allowed_token_ids` are data",
    "repetition_detection": "`repetition_penalty` and `frequency_penalty` work against repetition",
    "stream_interval": "tokens are sent as they come",
    "kv_transfer_params": "the KV cache is one mesh's own",
    "ec_transfer_params": "no encoder is served",
    "vllm_xargs": "nothing reads them",
    "routed_experts_prompt_start": "models here are dense",
    "return_token_offsets": "prompts are not rendered alone; `logprobs` have `text_offset`",
    "return_mm_kwargs": "only text is served",
    "thinking_token_budget": "only a chat has reasoning apart from its answer",
    "guided_decoding_backend": "there is one, for every constraint",
    "guided_whitespace_pattern": "the grammar's own rule for blanks is fixed",
    "prompt_embeds": "prompts are texts or token ids",
    "suffix": "no model here is trained to fill in the middle",
    "functions": "it is replaced by `tools`",
    "function_call": "it is replaced by `tool_choice`",
    "chat_template": "a template is a program, and only the model's own is run",
    "store": "no answer is kept",
    "service_tier": "all requests are of one tier; `priority` orders those that wait",
    "modalities": "only text is served",
    "audio": "only text is served",
    "prediction": "no draft is checked against the answer",
    "verbosity": "no model here is trained to heed it",
    "web_search_options": "nothing is looked up",
    "prompt_cache_retention": "what is cached stays in memory until its room is needed",
    "prompt_cache_options": "prompts are cached by themselves",
    "moderation": "nothing is moderated",
    "return_prompt_text": "`return_token_ids` gives the prompt's tokens",
    "mm_processor_kwargs": "only text is served",
    "media_io_kwargs": "only text is served",
}
