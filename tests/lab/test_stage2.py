"""The lab, chapter 2: the frame."""

import math

import torch

from stage2_req.cache import NullCacheManager
from stage2_req.params import SamplingParams
from stage2_req.req import Logprobs
from stage2_req.sampling import keep_likeliest
from stage2_req.scheduler import FCFSScheduler
from tests.lab.learner import batch, expect, request


class Test_2_1:
    """extend_len"""

    def test_a_new_request_computes_its_whole_prompt(self):
        expect("extend_len of a new request with 7 prompt tokens", request(7).extend_len, 7)

    def test_with_a_cache_a_decode_step_computes_one_position(self):
        req = request(7, max_tokens=5)
        req.cached_len, req.device_len = 7, 8
        expect("extend_len with cached_len 7, device_len 8", req.extend_len, 1)

    def test_without_a_cache_every_step_computes_everything(self):
        req = request(7, max_tokens=5)
        req.device_len = 10
        expect("extend_len with cached_len 0, device_len 10", req.extend_len, 10)

    def test_nothing_is_left_to_compute_once_the_last_allowed_token_exists(self):
        req = request(7, max_tokens=2)
        req.cached_len, req.device_len = 8, 9
        expect("extend_len with device_len 9 = max_device_len (7 + 2)", req.extend_len, 0)


def reason_after(req, *tokens: int) -> str | None:
    """As the scheduler asks: the token is appended first."""
    reason = None
    for token in tokens:
        req.token_ids.append(token)
        reason = req.reason_to_stop(token)
    return reason


class Test_2_2:
    """reason_to_stop"""

    def test_an_ordinary_token_ends_nothing(self):
        expect("reason_to_stop(5), the first of 4 allowed", reason_after(request(3, max_tokens=4), 5), None)

    def test_the_models_end_token_unless_it_is_ignored(self):
        expect("reason_to_stop(eos)", reason_after(request(3, eos=99), 99), "eos")
        ignoring = request(3, eos=99, ignore_eos=True)
        expect("reason_to_stop(eos) with ignore_eos", reason_after(ignoring, 99), None)

    def test_a_stop_token_of_the_caller(self):
        req = request(3, stop_token_ids=[5], ignore_eos=True)
        expect("reason_to_stop(5) with stop_token_ids [5]", reason_after(req, 5), "stop_token")

    def test_the_callers_limit(self):
        expect("reason_to_stop after 2 of 2 tokens", reason_after(request(3, max_tokens=2), 5, 6), "max_tokens")

    def test_the_models_limit_is_another_reason_than_the_callers(self):
        req = request(3, max_len=4, max_tokens=10)  # its last token needs no slot: 5 tokens in all
        expect("reason_to_stop after 4 of at most 5 tokens", reason_after(req, 5), None)
        expect("reason_to_stop after 5 of at most 5 tokens", reason_after(req, 6), "length")

    def test_an_end_token_as_the_last_allowed_one_is_still_an_end_token(self):
        expect("reason_to_stop(eos) at the limit", reason_after(request(3, max_tokens=1, eos=99), 99), "eos")


def kept(logits: list[float], **params) -> list[int]:
    """Which tokens remain possible."""
    row = keep_likeliest(torch.tensor([logits]), [SamplingParams(**{"temperature": 1.0} | params)])
    return [token for token, logit in enumerate(row[0].tolist()) if logit != -math.inf]


SCORES = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]  # logits of these probabilities


class Test_2_3:
    """keep_likeliest"""

    def test_top_k_keeps_the_k_likeliest(self):
        expect("top_k=2 of probabilities 0.1, 0.4, 0.3, 0.2: tokens kept", kept(SCORES, top_k=2), [1, 2])

    def test_top_p_keeps_the_fewest_that_reach_p(self):
        expect("top_p=0.65 of probabilities 0.1, 0.4, 0.3, 0.2: kept", kept(SCORES, top_p=0.65), [1, 2])
        expect("top_p=0.2 of the same: the likeliest always stays", kept(SCORES, top_p=0.2), [1])

    def test_min_p_is_relative_to_the_likeliest(self):
        expect("min_p=0.6 of probabilities 0.1, 0.4, 0.3, 0.2: kept", kept(SCORES, min_p=0.6), [1, 2])

    def test_top_p_looks_at_probabilities_after_the_temperature(self):
        # at temperature 0.5 they are squared and become 0.033, 0.533, 0.3, 0.133
        expect("top_p=0.5, temperature 0.5: kept", kept(SCORES, top_p=0.5, temperature=0.5), [1])

    def test_top_p_looks_at_what_top_k_has_left(self):
        # of the two that are left the first has probability 0.4 / 0.7 = 0.57
        expect("top_k=2 and top_p=0.5: kept", kept(SCORES, top_k=2, top_p=0.5), [1])

    def test_top_p_1_rules_nothing_out_not_even_by_rounding(self):
        expect("top_k=3, top_p=1 of logits 0, -18, -40: kept", kept([0.0, -18.0, -40.0], top_k=3, top_p=1.0), [0, 1, 2])


def running(*reqs) -> FCFSScheduler:
    scheduler = FCFSScheduler(NullCacheManager(max_len=100))
    for req in reqs:
        scheduler.add(req)
    scheduler.waiting.clear()
    scheduler.running += reqs
    return scheduler


def step_of(*reqs):
    return batch(*((req, req.device_len - req.cached_len) for req in reqs))


class Test_2_4:
    """update"""

    def test_every_request_gets_its_token(self):
        a, b = request(3, uid=1), request(3, uid=2)
        outputs = running(a, b).update(step_of(a, b), [50, 60])
        expect(
            "update(…, [50, 60]): the outputs' (uid, token)", [(o.uid, o.token_id) for o in outputs], [(1, 50), (2, 60)]
        )
        expect("output_ids of both afterwards", [a.output_ids, b.output_ids], [[50], [60]])

    def test_a_request_that_is_done_leaves_and_says_why(self):
        a, b = request(3, uid=1, max_tokens=1), request(3, uid=2)
        scheduler = running(a, b)
        outputs = scheduler.update(step_of(a, b), [50, 60])
        expect("update with max_tokens=1: finish reasons", [o.finish_reason for o in outputs], ["max_tokens", None])
        expect("uids that still run", [req.uid for req in scheduler.running], [2])

    def test_a_chunk_of_a_prompt_gets_no_token(self):
        a, b = request(8, uid=1), request(3, uid=2)
        outputs = running(a, b).update(batch((a, 4), (b, 3)), [60])
        expect("update, 4 of a's 8 positions and all of b's: uids with a token", [o.uid for o in outputs], [2])

    def test_a_token_for_a_request_that_ended_meanwhile_is_dropped(self):
        a, b = request(3, uid=1), request(3, uid=2)
        scheduler, step = running(a, b), step_of(a, b)
        scheduler.abort(1)
        outputs = scheduler.update(step, [50, 60])
        expect("update after a was aborted: uids with a token", [o.uid for o in outputs], [2])
        expect("output_ids of the aborted one", a.output_ids, [])

    def test_each_gets_as_many_logprobs_as_it_asked_for(self):
        a, b = request(3, uid=1, logprobs=1), request(3, uid=2)
        found = Logprobs(-0.1, [(50, -0.1), (7, -3.0)])
        outputs = running(a, b).update(step_of(a, b), [50, 60], [found, found])
        expect(
            "update with logprobs=1 and None: logprobs",
            [o.logprobs for o in outputs],
            [Logprobs(-0.1, [(50, -0.1)]), None],
        )
        expect("req.logprobs of both", [a.logprobs, b.logprobs], [[Logprobs(-0.1, [(50, -0.1)])], []])

    def test_the_time_of_the_first_token_stays(self):
        a = request(3, uid=1)
        scheduler = running(a)
        scheduler.update(step_of(a), [50])
        first = a.first_token_at
        a.device_len += 1
        scheduler.update(step_of(a), [51])
        expect(
            "first_token_at: is it set, and kept with the second token?",
            (first > 0, a.first_token_at == first),
            (True, True),
        )
