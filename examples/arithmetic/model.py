"""The tokenizer and the model of the arithmetic example: ordinary Hugging Face classes at the size of a toy."""

from __future__ import annotations

from typing import cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.arithmetic.chains import MARKER

PAD, USER, ASSISTANT, END, UNKNOWN = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|unknown|>"
CHARACTERS = [chr(code) for code in range(ord(" "), ord("~") + 1)] + ["\n"]
VOCABULARY = [PAD, USER, ASSISTANT, END, UNKNOWN, MARKER, *CHARACTERS]
PAD_ID, END_ID = VOCABULARY.index(PAD), VOCABULARY.index(END)
VOCAB_SIZE = 128
POSITIONS = 512

# A system message is put where a user message would be: this vocabulary has no token of its own for it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message.role == 'assistant' %}}{ASSISTANT}{{{{ message.content }}}}{END}"
    f"{{% else %}}{USER}{{{{ message.content }}}}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline, and one for `####`; decoding gives the text back exactly.

    `####` is an ordinary token, not a special one, so that decoding without special tokens keeps it.
    """
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{MARKER}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """A randomly initialised Llama of 147,776 float32 parameters; the vocabulary is padded to 128 ids."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            max_position_embeddings=POSITIONS,
            initializer_range=0.04,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
            dtype="float32",
        )
    )
    # Spelled out because an absent top_k means 50 to `generate`: sampling follows the model's own distribution.
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=END_ID, pad_token_id=PAD_ID
    )
    return model


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Token ids of a chat with one user message, up to where the response begins."""
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return cast("list[int]", ids)


def response_ids(tokenizer: PreTrainedTokenizerFast, response: str) -> list[int]:
    """Token ids of a response, the end token included."""
    return [*tokenizer.encode(response, add_special_tokens=False), END_ID]
