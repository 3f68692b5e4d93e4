"""The engines that bench_peers.py compares, each with its own way to start. Runs with the packages of one of them:

python stage9_server/peers.py vllm MODEL --rounds 3      prints a line of JSON: version, seconds to start, seconds a round
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from common import workload

MAX_LEN, TEMPERATURE = 4096, 0.6
BATCH_TOKENS = 16384  # of this engine; the others have their own defaults
DUMMY = "dummy:"  # before a folder that has no weights: they are made up

# (prompts, lengths) -> nothing; every request gets exactly as many tokens as its length says
Generate = Callable[[list[list[int]], list[int]], None]


def this_engine(folder: str, dummy: bool) -> tuple[str, Generate]:
    from common.config import EngineConfig
    from stage2_req.params import SamplingParams
    from stage6_cudagraph.build import build_engine

    name = DUMMY + Path(folder).name if dummy else folder
    engine = build_engine(EngineConfig(name, max_model_len=MAX_LEN, max_batch_tokens=BATCH_TOKENS))

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        params = [SamplingParams(TEMPERATURE, max_tokens=n, ignore_eos=True) for n in lengths]
        reqs = engine.generate(prompts, params)
        assert [len(req.output_ids) for req in reqs] == lengths

    return "this repository", generate


def vllm(folder: str, dummy: bool) -> tuple[str, Generate]:
    import vllm

    more = {"load_format": "dummy"} if dummy else {}
    attention = {"backend": "FLASH_ATTN"}
    llm = vllm.LLM(
        folder, dtype="bfloat16", max_model_len=MAX_LEN, enable_prefix_caching=False, attention_config=attention, **more
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        how = {"temperature": TEMPERATURE, "ignore_eos": True, "detokenize": False}
        params = [vllm.SamplingParams(max_tokens=n, **how) for n in lengths]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths

    return vllm.__version__, generate


def sglang(folder: str, dummy: bool) -> tuple[str, Generate]:
    import sglang

    llm = sglang.Engine(
        model_path=folder, dtype="bfloat16", context_length=MAX_LEN, disable_radix_cache=True, skip_tokenizer_init=True,
        attention_backend="fa3", sampling_backend="pytorch", grammar_backend="none", cuda_graph_max_bs_decode=256,
        mem_fraction_static=0.85, load_format="dummy" if dummy else "auto", log_level="error",
    )  # fmt: skip

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        how = {"temperature": TEMPERATURE, "ignore_eos": True}
        outputs = llm.generate(input_ids=prompts, sampling_params=[how | {"max_new_tokens": n} for n in lengths])
        assert [output["meta_info"]["completion_tokens"] for output in outputs] == lengths

    return sglang.__version__, generate


def nano_vllm(folder: str, dummy: bool) -> tuple[str, Generate]:
    from nanovllm import LLM, SamplingParams

    llm = LLM(folder, enforce_eager=False, max_model_len=MAX_LEN)

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        params = [SamplingParams(TEMPERATURE, ignore_eos=True, max_tokens=n) for n in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == lengths

    return "its main branch", generate


OFFLINE = {"this engine": this_engine, "vllm": vllm, "sglang": sglang, "nano-vllm": nano_vllm}
SERVERS = {  # commands, to be followed by the folder, and the port's flag with the port
    "this engine": (
        "stage9_server.launch", "--max-model-len", str(MAX_LEN), "--max-batch-tokens", str(BATCH_TOKENS),
        "--max-queue", "1000", "--log-level", "warning", "--model",
    ),
    "vllm": (
        "vllm.entrypoints.openai.api_server", "--max-model-len", str(MAX_LEN), "--dtype", "bfloat16",
        "--host", "127.0.0.1", "--attention-config.backend", "FLASH_ATTN", "--model",
    ),
    "sglang": (
        "sglang.launch_server", "--context-length", str(MAX_LEN), "--dtype", "bfloat16", "--attention-backend", "fa3",
        "--sampling-backend", "pytorch", "--grammar-backend", "none", "--cuda-graph-max-bs", "256", "--model-path",
    ),
}  # fmt: skip
ENVIRONMENT = {  # what keeps them from asking the network, and from parts that they can do without
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_HOST_IP": "127.0.0.1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=OFFLINE)
    parser.add_argument("model", help=f"a folder; {DUMMY}FOLDER if it has no weights")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder = args.model.removeprefix(DUMMY)
    os.environ |= {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    start = time.perf_counter()
    version, generate = OFFLINE[args.engine](folder, folder != args.model)
    started = time.perf_counter() - start
    items = workload.offline()
    prompts, lengths = [item.prompt_ids for item in items], [item.max_tokens for item in items]
    generate(prompts[:1], [16])
    rounds = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        generate(prompts, lengths)
        rounds.append(time.perf_counter() - start)
    print(json.dumps({"version": version, "start": started, "tokens": sum(lengths), "rounds": rounds}), flush=True)
    os._exit(0)  # some have threads that would be waited for; whoever started this ends their processes


if __name__ == "__main__":
    main()
