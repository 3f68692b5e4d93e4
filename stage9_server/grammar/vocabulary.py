"""The bytes of all tokens and the ids of the special ones, in msgpack on stdout: python -m stage9_server.grammar.vocabulary MODEL"""

import sys

import msgspec

from common.tokenizer import load_tokenizer
from stage9_server.byte_tokenizer import ByteTokenizer


def vocabulary(model: str) -> tuple[list[bytes], list[int]]:
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        tokenizer = ByteTokenizer()
        return [tokenizer.token_bytes(token) for token in range(256)], []
    tokens = [tokenizer.token_bytes(token) for token in range(len(tokenizer.hf))]
    return tokens, list(tokenizer.special_tokens)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.msgpack.encode(vocabulary(sys.argv[1])))
