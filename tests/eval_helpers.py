"""A tiny random llama with a tokenizer of its own, for the tests of scoring and evaluation."""

from __future__ import annotations

from pathlib import Path

MAX_LEN = 64
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Question: which city is the capital of France? Answer: Paris.",
    "name: Blue Cafe, phone: 555-1234. name: Red Diner, phone: 555-9876.",
    "yes no yes no A B C D one two three four five six seven",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im|>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant: {% endif %}"
)


def make_tiny_model(folder: Path, *, add_bos: bool = False, max_len: int = MAX_LEN) -> Path:
    """A Hugging Face folder: random fp32 llama (vocabulary 400, 64 positions), byte-level BPE, chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


class Reference:
    """transformers' log-likelihoods, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def logprobs(self, token_ids: list[int], n_scored: int) -> tuple[list[float], bool]:
        """Log-probabilities of the last n_scored tokens, and whether all are the likeliest."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids[:-1]])).logits[0].log_softmax(-1)[-n_scored:]
        targets = torch.tensor(token_ids[-n_scored:])
        values = logits.gather(1, targets[:, None])[:, 0].tolist()
        return values, bool((logits.argmax(-1) == targets).all())
