"""A child process that plays a worker by a script: it hangs, dies or talks nonsense where it is told to."""

import json
from pathlib import Path

from cuda_kernels import device as devices
from tactics.format import Format
from tactics.tactic import Tactic, Tile
from tests.problems import RELU, conv_case

H200 = devices.named("h200")
PROBLEM = conv_case(1, 64, 8, 8, 64, 3, 3, pad=(1, 1, 1, 1), bias=True, act=RELU, sparse24=True)
HWC8, CHW = Format("fp16", "hwc8"), Format("fp16", "chw")
ROOT = Path(__file__).resolve().parents[3]
# Argument 1: {tactic name or "setup" or "start": the fault}; argument 2: a file that gets a line per request.
FAKE_WORKER = """
import json, os, sys, time
how, log = json.loads(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
def act(what):
    if what == "hang": time.sleep(60)
    if what == "crash": os.abort()
    if what == "killed": os.kill(os.getpid(), 9)
    if what == "leave": sys.exit("out of luck")
    if what == "garbage": print("Segmentation fault?", flush=True)
    if what == "list": print("[1, 2]", flush=True)
    if what == "other id": print(json.dumps({"id": -1, "us": []}), flush=True)
print("started", file=log)
act(how.get("start"))
print(json.dumps({"device": how.get("device", "H200 SXM 141GB|sm_90a|132|62914560")}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(line.strip(), file=log)
    answer = {"id": request["id"]}
    if request["op"] == "problem":
        act(how.get("setup"))
        if how.get("setups", 9) <= open(sys.argv[2]).read().count('"op": "problem"') - 1: answer["error"] = "no device"
        if how.get("setup") == "error": answer["error"] = "out of memory"
    else:
        names, count = request["tactics"], request["samples"]
        if lock := how.get("lock"):  # found only where another child times at the same moment
            try: os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            except FileExistsError: print("two races at a time", file=log)
            time.sleep(0.002)
        answer |= {"us": {}, "mhz": {}, "rel_error": {}, "slow": how.get("slow", 0)}
        for name in names:
            what = how.get(name, 10.0)
            if isinstance(what, list): what = what[min(open(sys.argv[2]).read().count("started"), len(what)) - 1]
            if what == "jointly": what = "crash" if len(names) > 1 else 10.0
            if isinstance(what, str): act(what)
            if what == "slow": time.sleep(0.4); what = 10.0
            if what == "error": answer["error"] = "RuntimeError: wrong: relative error 0.5"
            elif what == "fatal": answer |= {"error": "CUDARuntimeError: misaligned address", "fatal": True}
            elif what == "busy": answer |= {"error": "Overloaded: too busy", "passing": True}
            elif what == "few": answer["us"][name] = []
            elif what == "negative": answer["us"][name] = [-1.0] * count
            elif not isinstance(what, str):
                answer["us"][name] = [what + 0.01 * i for i in range(count)]
                answer["mhz"][name], answer["rel_error"][name] = [1755] * count, 2e-4
        if lock: os.unlink(lock)
    print(json.dumps(answer), flush=True)
"""


def requests(fake):
    return [json.loads(line) for line in fake.log() if line.startswith("{")]


def tactics(count, out=HWC8, kernel="conv_dense"):
    return [Tactic(kernel, Tile(16 * (i + 1), 128, 64, 1, 4, 3), (HWC8,), out) for i in range(count)]
