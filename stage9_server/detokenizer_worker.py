"""Token ids to text, beside the engine; finds stop strings."""

from common.tokenizer import load_tokenizer
from stage9_server.byte_tokenizer import ByteTokenizer
from stage9_server.ipc import API, SCHEDULER, Settings, Worker, run_worker
from stage9_server.messages import Abort, Failed, Message, Piece, Pieces, Started, Token, TokenLogprob, Tokens
from stage9_server.text import TextStream

FINISH_REASONS = {"eos": "stop", "stop_token": "stop", "max_tokens": "length", "length": "length", "abort": "abort"}


class SequenceText:
    """One sequence that is being answered."""

    def __init__(self, started: Started, tokenizer):
        self.uid, self.prompt_tokens = started.uid, started.prompt_tokens
        self.tokenizer, self.text = tokenizer, TextStream(tokenizer, started.stop, started.echo_ids, started.continues)

    def accepted(self) -> Piece:
        return Piece(self.uid, self.text.echo, 0, None, self.prompt_tokens, 0)

    def push(self, token: Token) -> Piece:
        """A token that ended the sequence by what it is (eos) is counted but not shown. It may complete a stop string."""
        text, stopped, logprobs = "", False, []
        reason = token.finish_reason and FINISH_REASONS[token.finish_reason]
        if reason != "stop" or token.token_id in self.text.special:
            text, stopped = self.text.push(token.token_id)
        if reason != "stop" and token.logprob is not None:
            top = [self.logprob(*rival) for rival in token.top_logprobs]
            logprobs.append((self.logprob(token.token_id, token.logprob), top))
        if reason and not stopped:
            rest, stopped = self.text.flush()
            text += rest
        reason = "stop" if stopped else reason
        return Piece(self.uid, text, 1, reason, self.prompt_tokens, token.cached_tokens, logprobs)

    def logprob(self, token: int, logprob: float) -> TokenLogprob:
        data = self.tokenizer.token_bytes(token, skip_special=False)
        shown = bool(self.tokenizer.token_bytes(token)) or not data
        return TokenLogprob(data.decode(errors="replace"), logprob, data, shown)


class Detokenizing:
    """Owns the texts of all sequences. `tokenizer` has the interface of common.tokenizer.Tokenizer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.sequences: dict[int, SequenceText] = {}

    def handle(self, message: Started | Tokens | Abort) -> list[tuple[str, Message]]:
        """[(receiver, message)]"""
        if isinstance(message, Tokens):
            return self.push(message.tokens)
        if isinstance(message, Abort):
            for uid in message.uids:
                self.sequences.pop(uid, None)
            return []
        sequence = self.sequences[message.uid] = SequenceText(message, self.tokenizer)
        return [(API, Pieces([sequence.accepted()]))]

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
            result.append((SCHEDULER, Abort(stopped + unknown)))
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
