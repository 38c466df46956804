"""A model's own tokenizer for HELM, without transformers and without a cache: it is quicker than one."""

from __future__ import annotations

from helm.common.tokenization_request import (
    DecodeRequest,
    DecodeRequestResult,
    TokenizationRequest,
    TokenizationRequestResult,
    TokenizationToken,
)
from helm.tokenizers.tokenizer import Tokenizer

from flexrun.evaluate.helm_engine import tokenizer_for
from flexrun.evaluate.pieces import token_pieces


class FlexrunTokenizer(Tokenizer):
    """Args: model: what -m names."""

    def __init__(self, model: str) -> None:
        self._model = model

    def tokenize(self, request: TokenizationRequest) -> TokenizationRequestResult:
        """Ids, or the tokens' texts; no BOS, since HELM joins and cuts texts by their tokens."""
        tokenizer = tokenizer_for(self._model)
        ids = tokenizer.encode(request.text, add_special_tokens=False)
        if request.truncation:
            ids = ids[: request.max_length]
        values: list[int] | list[str] = ids
        if not request.encode:
            values = token_pieces(tokenizer, ids, skip_special_tokens=False)
        return TokenizationRequestResult(
            success=True,
            cached=False,
            text=request.text,
            tokens=[TokenizationToken(value) for value in values],
            request_time=0.0,
        )

    def decode(self, request: DecodeRequest) -> DecodeRequestResult:
        """Text of ids, as it was."""
        text = tokenizer_for(self._model).decode(request.tokens, skip_special_tokens=False)
        return DecodeRequestResult(success=True, cached=False, text=text, request_time=0.0)
