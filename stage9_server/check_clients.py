"""Which clients work with the server: each is installed into an environment of its own and used against a running server.

python -m stage9_server.check_clients --envs /tmp/clients --save              # all of them, about ten minutes
python -m stage9_server.check_clients --envs /tmp/clients --only openai llm

A check is a small program, as a user of that client would write it; it works if it ends without an error.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from common import cli, report
from common.fetch import resolve_model
from stage9_server import local_server

COLUMNS = ["client", "version", "what", "result"]
TIME_LIMIT = 600  # seconds for one check
ROUTED = "sglang-router"

START = """
import json, os, subprocess, sys
URL, MODEL, FOLDER, BIN = (os.environ[name] for name in ("CHECK_URL", "CHECK_MODEL", "CHECK_FOLDER", "CHECK_BIN"))
V1 = URL + "/v1"
def run(command, **more):
    words = [word.format(URL=URL, V1=V1, MODEL=MODEL, FOLDER=FOLDER) for word in command.split()]
    done = subprocess.run([f"{BIN}/{words[0]}", *words[1:]], capture_output=True, text=True, env=os.environ | more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-500:]
    return done.stdout
"""
OPENAI = """
from openai import OpenAI
client = OpenAI(base_url=V1, api_key="none")
hello = dict(model=MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=12)
"""
# The default model is small: one of several answers has the form that was asked for.
INSTRUCTOR = """
import instructor
from openai import OpenAI
from pydantic import BaseModel
class City(BaseModel):
    name: str
client = instructor.from_openai(OpenAI(base_url=V1, api_key="x"), mode=instructor.Mode.MD_JSON)
ask = dict(model=MODEL, response_model=City, max_tokens=200, messages=[{"role": "user", "content": "Extract: Paris is a city."}])
def found(seed):
    try:
        return client.chat.completions.create(temperature=0.7, seed=seed, max_retries=2, **ask).name
    except Exception:
        return None
assert any(found(seed) for seed in range(8))
"""
# Whatever a small model writes, a text of this form comes to its end.
PLACE = """
from typing import Literal
from pydantic import BaseModel, Field
class Place(BaseModel):
    kind: Literal["city", "river"]
    hot: bool
    rank: int = Field(ge=0, le=9)
ASKED = 'Describe Paris as JSON, like this: {"kind": "city", "hot": true, "rank": 1}'
SAY = [{"role": "user", "content": ASKED}]
"""
LITELLM = (
    PLACE
    + """
import litellm
def ask(**more):
    return litellm.completion(model="openai/" + MODEL, api_base=V1, api_key="x", messages=SAY, max_tokens=200, **more).choices[0].message
"""
)
LANGCHAIN = (
    PLACE
    + """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(base_url=V1, api_key="x", model=MODEL, max_tokens=200)
"""
)
# JSON of any form: a small model may not come to its end, and seldom writes the form that was asked for.
JSON_MODE = (
    LANGCHAIN
    + """
from openai import LengthFinishReasonError
asks = model.with_structured_output(Place, method="json_mode", include_raw=True)
def found():
    try:
        return asks.invoke(ASKED)
    except LengthFinishReasonError:
        return None
answers = [answer for answer in (found() for _ in range(8)) if answer]
assert answers and all(isinstance(json.loads(answer["raw"].content), dict) for answer in answers)
assert any(isinstance(answer["parsed"], Place) for answer in answers)
"""
)
STRUCTURED = (
    PLACE
    + """
import instructor
from openai import OpenAI
client = instructor.from_openai(OpenAI(base_url=V1, api_key="x"), mode=instructor.Mode.%s)
assert isinstance(client.chat.completions.create(model=MODEL, response_model=Place, max_retries=0, max_tokens=200, messages=SAY), Place)
"""
)
PYDANTIC_AI = (
    PLACE
    + """
from pydantic_ai import Agent, NativeOutput, ToolDefinition, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key="x"))
def output(kind):
    return Agent(model, output_type=kind, retries=0, model_settings={"max_tokens": 200}).run_sync(ASKED).output
"""
)
AGENTS = (
    PLACE
    + """
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=V1, api_key="x"))
def final(**more):
    return Runner.run_sync(Agent("a", model=model, **more), ASKED).final_output
"""
)
LLAMA_INDEX = (
    PLACE
    + """
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
llm = OpenAILike(model=MODEL, api_base=V1, api_key="x", is_chat_model=True, is_function_calling_model=True, max_tokens=200)
"""
)
# A small task for lm-eval: which of two ends fits; and one where an answer is generated.
TASKS = r"""
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
pairs = [("The capital of France is", " Paris", " banana"), ("Two plus two is", " four", " purple"),
         ("Water is made of hydrogen and", " oxygen", " music"), ("The sun rises in the", " east", " spoon"),
         ("Cats like to drink", " milk", " gravel"), ("A week has seven", " days", " oceans")]
with open(folder / "ends.jsonl", "w") as file:
    for i, (start, good, bad) in enumerate(pairs):
        choices = [good, bad] if i % 2 else [bad, good]
        print(json.dumps({"start": start, "choices": choices, "label": choices.index(good)}), file=file)
common = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {folder}/ends.jsonl}}\ntest_split: test\ndoc_to_text: '{{{{start}}}}'\n"
(folder / "ends.yaml").write_text("task: ends\noutput_type: multiple_choice\n" + common + "target_delimiter: ''\ndoc_to_choice: choices\ndoc_to_target: label\nmetric_list:\n  - {metric: acc}\n")
(folder / "says.yaml").write_text("task: says\noutput_type: generate_until\n" + common + "target_delimiter: ''\ndoc_to_target: '{{choices[label]}}'\ngeneration_kwargs: {until: [\"\\n\"], max_gen_toks: 8, do_sample: false, temperature: 0}\nmetric_list:\n  - {metric: exact_match}\n")
def scores(task, *model):
    out = folder / model[0]
    run(f"lm_eval --model {' --model_args '.join(model)} --tasks {task} --include_path {folder} --output_path {out} --log_samples", HF_DATASETS_CACHE=str(folder / "cache"), TOKENIZERS_PARALLELISM="false")
    samples = [json.loads(line) for file in out.rglob(f"samples_{task}*.jsonl") for line in file.read_text().splitlines()]
    return [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
ours = ("local-completions", "base_url={V1}/completions,model={MODEL},tokenizer={FOLDER},tokenizer_backend=huggingface,num_concurrent=2,max_length=2000")
theirs = ("hf", "pretrained={FOLDER},dtype=float32")
"""


@dataclass
class Client:
    packages: tuple[str, ...]  # the first gives the version
    checks: dict[str, str]  # what -> a program
    shares: bool = False  # PyTorch and transformers with us


CLIENTS = {
    "openai": Client(("openai",), {
        "chat": OPENAI + "assert client.chat.completions.create(**hello).choices[0].message.content",
        "chat, streamed": OPENAI + "assert ''.join(c.choices[0].delta.content or '' for c in client.chat.completions.create(stream=True, **hello))",
        "completions": OPENAI + "assert client.completions.create(model=MODEL, prompt='Hello', max_tokens=5).choices[0].text",
        "raw answer, request id": OPENAI + "assert client.chat.completions.with_raw_response.create(**hello).headers['x-request-id']",
        "logprobs": OPENAI + "assert client.chat.completions.create(logprobs=True, top_logprobs=2, **hello).choices[0].logprobs.content",
        "parse": OPENAI + PLACE + "assert isinstance(client.chat.completions.parse(model=MODEL, messages=SAY, max_tokens=200, response_format=Place).choices[0].message.parsed, Place)",
        "parse, streamed": OPENAI + PLACE + "with client.chat.completions.stream(model=MODEL, messages=SAY, max_tokens=200, response_format=Place) as stream:\n    for _ in stream:\n        pass\n    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Place)",
        "tools": OPENAI + PLACE + "import openai\nmessage = client.chat.completions.parse(model=MODEL, messages=SAY, max_tokens=200, tools=[openai.pydantic_function_tool(Place)], tool_choice='required').choices[0].message\nassert message.tool_calls and all(isinstance(call.function.parsed_arguments, Place) for call in message.tool_calls)",
        "models": OPENAI + "assert client.models.list().data[0].id == MODEL",
    }),
    "litellm": Client(("litellm",), {
        "chat": "import litellm\nanswer = litellm.completion(model='openai/' + MODEL, api_base=V1, api_key='x', max_tokens=8, messages=[{'role': 'user', 'content': 'hi'}])\nassert answer.choices[0].message.content",
        "chat, streamed": "import litellm\nparts = litellm.completion(model='openai/' + MODEL, api_base=V1, api_key='x', max_tokens=8, stream=True, messages=[{'role': 'user', 'content': 'hi'}])\nassert ''.join(p.choices[0].delta.content or '' for p in parts)",
        "tools": LITELLM + "tool = {'type': 'function', 'function': {'name': 'place', 'parameters': Place.model_json_schema()}}\ncalls = ask(tools=[tool], tool_choice='required').tool_calls\nassert calls and all(call.function.name == 'place' and Place.model_validate_json(call.function.arguments) for call in calls)",
        "response_format": LITELLM + "assert Place.model_validate_json(ask(response_format=Place).content)",
    }),
    "langchain-openai": Client(("langchain-openai",), {
        "chat": "from langchain_openai import ChatOpenAI\nmodel = ChatOpenAI(base_url=V1, api_key='x', model=MODEL, max_tokens=8)\nassert model.invoke('hi').content",
        "chat, streamed": "from langchain_openai import ChatOpenAI\nmodel = ChatOpenAI(base_url=V1, api_key='x', model=MODEL, max_tokens=8)\nassert ''.join(part.content for part in model.stream('hi'))",
        "bind_tools": LANGCHAIN + "calls = model.bind_tools([Place], tool_choice='any').invoke(ASKED).tool_calls\nassert calls and all(call['name'] == 'Place' and Place(**call['args']) for call in calls)",
        "with_structured_output, function_calling": LANGCHAIN + "assert isinstance(model.with_structured_output(Place, method='function_calling').invoke(ASKED), Place)",
        "with_structured_output, json_schema": LANGCHAIN + "assert isinstance(model.with_structured_output(Place, method='json_schema').invoke(ASKED), Place)",
        "with_structured_output, json_mode": JSON_MODE,
    }),
    "llama-index": Client(("llama-index-llms-openai-like",), {
        "chat": "from llama_index.core.llms import ChatMessage\nfrom llama_index.llms.openai_like import OpenAILike\nllm = OpenAILike(model=MODEL, api_base=V1, api_key='x', is_chat_model=True, max_tokens=8)\nassert llm.chat([ChatMessage('hi')]).message.content",
        "completions, streamed": "from llama_index.llms.openai_like import OpenAILike\nllm = OpenAILike(model=MODEL, api_base=V1, api_key='x', max_tokens=8)\nassert list(llm.stream_complete('Hello'))[-1].text",
        "structured_predict": LLAMA_INDEX + "assert isinstance(llm.structured_predict(Place, PromptTemplate('Describe {what} as JSON.'), what='Paris'), Place)",
    }),
    "instructor": Client(("instructor",), {
        "MD_JSON": INSTRUCTOR,
        "TOOLS": STRUCTURED % "TOOLS",
        "JSON_SCHEMA": STRUCTURED % "JSON_SCHEMA",
    }),
    "pydantic-ai": Client(("pydantic-ai-slim", "pydantic-ai-slim[openai]"), {
        "text": "from pydantic_ai import Agent\nfrom pydantic_ai.models.openai import OpenAIChatModel\nfrom pydantic_ai.providers.openai import OpenAIProvider\nagent = Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key='x')), model_settings={'max_tokens': 12})\nassert agent.run_sync('Say hello.').output",
        "tools": PYDANTIC_AI + "tool = ToolDefinition(name='place', parameters_json_schema=Place.model_json_schema())\nwanted = ModelRequestParameters(function_tools=[tool], allow_text_output=False)\nanswer = model_request_sync(model, [ModelRequest.user_text_prompt(ASKED)], model_settings={'max_tokens': 200}, model_request_parameters=wanted)\ncalls = [part for part in answer.parts if part.part_kind == 'tool-call']\nassert calls and all(part.tool_name == 'place' and Place(**part.args_as_dict()) for part in calls)",
        "output type, tool": PYDANTIC_AI + "assert isinstance(output(ToolOutput(Place)), Place)",
        "output type, native": PYDANTIC_AI + "assert isinstance(output(NativeOutput(Place)), Place)",
    }),
    "openai-agents": Client(("openai-agents",), {
        "chat model": "from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled\nfrom openai import AsyncOpenAI\nset_tracing_disabled(True)\nmodel = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=V1, api_key='x'))\nassert Runner.run_sync(Agent('a', model=model, model_settings=ModelSettings(max_tokens=12)), 'Say hello.').final_output",
        "tools": AGENTS + "@function_tool\ndef place(kind: Literal['city', 'river'], hot: bool) -> str:\n    return f'{kind} {hot}'\nsettings = ModelSettings(tool_choice='required', max_tokens=200)\nassert final(tools=[place], tool_use_behavior='stop_on_first_tool', model_settings=settings) in {f'{kind} {hot}' for kind in ('city', 'river') for hot in (True, False)}",
        "output type": AGENTS + "assert isinstance(final(output_type=Place, model_settings=ModelSettings(max_tokens=200)), Place)",
    }),
    "llm": Client(("llm",), {
        "prompt": "import pathlib, tempfile\nhome = tempfile.mkdtemp()\npathlib.Path(home, 'extra-openai-models.yaml').write_text(f'- model_id: ours\\n  model_name: {MODEL}\\n  api_base: {V1}\\n')\nassert run('llm -m ours -o max_tokens 8 hello', LLM_USER_PATH=home, OPENAI_API_KEY='x').strip()",
    }),
    "guidellm": Client(("guidellm",), {
        "benchmark": "import tempfile\npath = tempfile.mkdtemp() + '/out.json'\nrun('guidellm run --backend kind=openai_http,target={URL},model={MODEL} --profile kind=concurrent,streams=2 --constraint kind=max_requests,count=4 --tokenizer kind=hf_auto,model={FOLDER} --data kind=synthetic_text,prompt_tokens=32,output_tokens=8 --disable-progress --output kind=json,path=' + path)\ntotals = json.load(open(path))['benchmarks'][0]['metrics']['request_totals']\nassert (totals['successful'], totals['errored']) == (4, 0), totals",
    }),
    "aiperf": Client(("aiperf",), {
        "benchmark": "import tempfile\nfolder = tempfile.mkdtemp()\nos.environ.pop('HF_HUB_OFFLINE', None)\nrun('aiperf profile --model {MODEL} --url {URL} --endpoint-type chat --streaming --concurrency 2 --request-count 4 --tokenizer {FOLDER} --synthetic-input-tokens-mean 32 --output-tokens-mean 8 --ui none --artifact-dir ' + folder)\nassert json.load(open(folder + '/profile_export_aiperf.json'))['request_count']['avg'] == 4",
    }),
    "lm-eval": Client(("lm-eval", "lm-eval[api]"), {
        "multiple choice, as with Hugging Face": TASKS + "ours, theirs = scores('ends', *ours), scores('ends', *theirs)\nflat = lambda found: [float(x[0]) for sample in found for x in sample]\nassert len(flat(ours)) == 12 and all(abs(a - b) < 0.05 for a, b in zip(flat(ours), flat(theirs))), (ours, theirs)",
        "generation, as with Hugging Face": TASKS + "ours, theirs = scores('says', *ours), scores('says', *theirs)\nassert ours and ours == theirs, (ours, theirs)",
    }, shares=True),
    ROUTED: Client((ROUTED,), {
        "chat": "import urllib.request\nask = urllib.request.Request(V1 + '/chat/completions', json.dumps({'model': MODEL, 'messages': [{'role': 'user', 'content': 'hi'}], 'max_tokens': 8}).encode(), {'Content-Type': 'application/json'})\nassert json.load(urllib.request.urlopen(ask))['choices'][0]['message']['content']",
        "/generate": "import urllib.request\nask = urllib.request.Request(URL + '/generate', json.dumps({'text': 'hi', 'sampling_params': {'max_new_tokens': 8}}).encode(), {'Content-Type': 'application/json'})\nassert json.load(urllib.request.urlopen(ask))['text']",
    }),
}  # fmt: skip


def main() -> None:
    parser = cli.parser(__doc__, flags=("model", "save"))
    parser.add_argument("--envs", help="where the environments are made, and kept (default: a new temporary folder)")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), help="(default: all)")
    args = parser.parse_args()
    envs, folder = Path(args.envs or tempfile.mkdtemp(prefix="clients-")), resolve_model(args.model)
    rows = []
    with local_server.running("--model", args.model, "--dtype", "float32", "--port", "0") as server:
        for name in args.only:
            rows += check(name, CLIENTS[name], envs / name, server.url, args.model, folder)
    report.table(f"clients of {args.model}", COLUMNS, rows)
    if args.save:
        args.envs, path = None, report.results_path(__file__, report.record_name("clients"))
        saved = json.loads(path.read_text())["rows"] if path.exists() else []
        rows += [row for row in saved if row[0] not in args.only]  # a client that was not tried keeps its own
        rows.sort(key=lambda row: list(CLIENTS).index(row[0]))
        report.save(__file__, "clients", args, {"columns": COLUMNS, "rows": rows})


def check(name: str, client: Client, env: Path, url: str, model: str, folder: Path) -> list[list[str]]:
    report.say(f"{name}: installing")
    version = install(client, env)
    with behind_router(env, url) if name == ROUTED else contextlib.nullcontext(url) as target:
        places = {"CHECK_URL": target, "CHECK_MODEL": model, "CHECK_FOLDER": str(folder), "CHECK_BIN": str(env / "bin")}
        result = []
        for what, program in client.checks.items():
            result.append([name, version, what, outcome(env, program, places)])
            report.say(f"{name}: {what}: {result[-1][-1]}")
    return result


def install(client: Client, env: Path) -> str:
    """Into its environment, unless it is there; the version."""
    python = env / "bin" / "python"
    if not python.exists():
        venv.create(env, with_pip=True)
        if client.shares:
            (site,) = env.glob("lib/python*/site-packages")
            (site / "ours.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")))
        wanted = client.packages[1:] or client.packages
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    ask = f"import importlib.metadata as m; print(m.version({client.packages[0]!r}))"
    return subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()


def outcome(env: Path, program: str, places: dict[str, str]) -> str:
    """ "works", or the last line of what went wrong."""
    hushed = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "none"}
    command = [env / "bin" / "python", "-c", START + program]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | hushed | places, timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"fails: no end after {TIME_LIMIT} s"
    lines = done.stderr.strip().splitlines() or ["no message"]
    return "works" if done.returncode == 0 else f"fails: {lines[-1][:300]}"


@contextlib.contextmanager
def behind_router(env: Path, url: str):
    """The address of SGLang's router, in front of the server."""
    ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    port, metrics = (sock.getsockname()[1] for sock in ports)
    for sock in ports:
        sock.close()
    words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error"]
    command = [env / "bin" / "python", "-m", "sglang_router.launch_router", *words, "--worker-urls", url]
    with subprocess.Popen([*command, "--policy", "cache_aware"], stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/v1/models")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def wait_for(url: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url) as answer:
                if json.load(answer)["data"]:
                    return
        except OSError:
            pass
        if time.monotonic() > end:
            raise TimeoutError(url)
        time.sleep(0.2)


if __name__ == "__main__":
    cli.run(main)
