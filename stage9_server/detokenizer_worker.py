"""Token ids to text, beside the engine; finds stop strings."""

from common.tokenizer import load_tokenizer
from stage9_server.byte_tokenizer import ByteTokenizer
from stage9_server.guard.process import run_worker
from stage9_server.ipc import API, SCHEDULER, Settings, Worker
from stage9_server.messages import Abort, Failed, Message, Piece, Pieces, Started, Stopped, Token, TokenLogprob, Tokens
from stage9_server.text import TextStream

FINISH_REASONS = {"eos": "stop", "stop_token": "stop", "max_tokens": "length", "length": "length", "abort": "abort"}


class SequenceText:
    """One sequence that is being answered."""

    def __init__(self, started: Started, tokenizer):
        self.started, self.tokenizer = started, tokenizer
        self.text = TextStream(tokenizer, started.options, started.echo_ids)
        self.echo, self.queue_seconds = self.text.echo, started.queue_seconds  # to be sent with the first piece

    def push(self, token: Token) -> Piece:
        """A token that ends the sequence by what it is (eos) is counted, and shown only where that is asked for. It may
        complete a stop string.
        """
        options, counts = self.started.options, (self.started.prompt_tokens, token.cached_tokens)
        prompt = zip(self.started.echo_ids, token.prompt_logprobs, strict=False)
        logprobs = [(self.logprob(id, entry and entry[0]), self.top(entry[1] if entry else [])) for id, entry in prompt]
        if options.only_prompt:
            return Piece(token.uid, self.text.echo, [], "length", *counts, logprobs)
        reason = token.finish_reason and FINISH_REASONS[token.finish_reason]
        by_token = reason == "stop"
        text, stopped = self.text.push(token.token_id, last=by_token)
        if token.logprob is not None and (options.include_stop or not by_token):
            logprobs.append((self.logprob(token.token_id, token.logprob), self.top(token.top_logprobs)))
        if reason and not stopped:
            rest, stopped = self.text.flush()
            text += rest
        reason = "stop" if stopped else reason
        first = self.echo, self.queue_seconds
        self.echo, self.queue_seconds = "", None
        text, ids = first[0] + text, [token.token_id]
        return Piece(token.uid, text, ids, reason, *counts, logprobs, options.thinking, first[1])

    def top(self, rivals: list[tuple[int, float]]) -> list[TokenLogprob]:
        return [self.logprob(*rival) for rival in rivals]

    def logprob(self, token: int, logprob: float | None) -> TokenLogprob:
        data = self.tokenizer.token_bytes(token, skip_special=False)
        shown = not self.started.options.skip_special or bool(self.tokenizer.token_bytes(token)) or not data
        return TokenLogprob(data.decode(errors="replace"), logprob, data, shown)


class Detokenizing:
    """Owns the texts of all sequences. `tokenizer` has the interface of common.tokenizer.Tokenizer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.sequences: dict[int, SequenceText] = {}

    def handle(self, message: Tokens | Abort) -> list[tuple[str, Message]]:
        """[(receiver, message)]"""
        if isinstance(message, Tokens):
            for started in message.started:
                self.sequences[started.uid] = SequenceText(started, self.tokenizer)
            return self.push(message.tokens)
        for uid in message.uids:
            self.sequences.pop(uid, None)
        return []

    def push(self, tokens: list[Token]) -> list[tuple[str, Message]]:
        pieces, stopped, unknown = [], [], []
        for token in tokens:
            sequence = self.sequences.get(token.uid)
            if sequence is None:
                unknown.append(token.uid)
                continue
            pieces.append(piece := sequence.push(token))
            if piece.finish_reason:
                del self.sequences[token.uid]
                if not token.finish_reason:  # a stop string, of which the engine knows nothing
                    stopped.append(token.uid)
        result: list[tuple[str, Message]] = [(API, Pieces(pieces))] if pieces else []
        if stopped or unknown:
            result.append((SCHEDULER, Stopped(stopped + unknown)))
        if unknown:  # if the API server still waits for one of these, its beginning was lost with a predecessor of ours
            result.append((API, Failed(unknown, 500, "the text was lost because the detokenizer was restarted")))
        return result


def main(settings: Settings) -> None:
    worker = Worker(settings)
    detokenizing = Detokenizing(load_tokenizer(settings.engine.model) or ByteTokenizer())
    worker.ready()
    while True:
        for message in worker.receive(wait=True):
            for to, answer in detokenizing.handle(message):
                worker.send(to, answer)


if __name__ == "__main__":
    run_worker(main)
