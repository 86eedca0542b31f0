"""Two processes that serve one model over the devices of both answer as one process does, and end together."""

import re
import signal
import time
from pathlib import Path

import httpx
import yaml

import clusterkv_jax as ckv
from tests.support.job import Job, free_port, small_model

TEXT = "Once upon a time there was a ship with a sail, a mast and a cook who could not cook."
FILE = Path(__file__).parents[2] / "configs" / "serving" / "one-model.yaml"
SMALL = {"--method": "streamingllm", "--cache-ratio": None, "--max-tokens": 128, "--reserve": 64, "--host": "127.0.0.1"}


def test_two_processes_serve_one_model(tmp_path):
    model, port = small_model(tmp_path / "small"), free_port()

    groups = next(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))
    (container,) = groups["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    small = SMALL | {"--port": port}

    def command(folder, address, count, index):
        """The container's, for a small model on fake devices."""
        known = {"$(LWS_LEADER_ADDRESS):8476": address, "$(LWS_GROUP_SIZE)": count, "$(LWS_WORKER_INDEX)": index}
        options = [text.partition("=")[::2] for text in container["args"][1:]]
        told = [(name, small.get(name, known.get(value, value))) for name, value in options]
        own = [name if value == "" else f"{name}={value}" for name, value in told if value is not None]
        return ["-m", "clusterkv_jax", "serve", model, *own, "--cache-tokens=16", "--slots=2"]

    job, begin = Job(tmp_path / "job", command, devices=4), time.monotonic()
    try:
        job.start(2)
        while not (found := re.search(r"http://\S+", job.said[0].read_text())):
            assert time.monotonic() < begin + 300, job.stop()
            assert all(process.poll() is None for process in job.processes), job.stop()
            time.sleep(0.1)
        method = ckv.StreamingLLM(ckv.Budget(tokens=16))
        told = ckv.generate(ckv.load(model), [TEXT], method=method, keep_short=True, max_new_tokens=12).texts[0]
        with httpx.Client(base_url=found[0], timeout=60) as client:
            ask = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "stream": True}
            with client.stream("POST", "/v1/completions", json=ask | {"max_tokens": 60}) as response:
                next(response.iter_bytes())  # and leaves
            assert client.post("/v1/completions", json=ask | {"stream": False}).json()["choices"][0]["text"] == told
            said = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Who?"}]
            wanted = ask | {"stream": False, "response_format": {"type": "json_object"}, "messages": said}
            refused = client.post("/v1/chat/completions", json=wanted)
            assert refused.status_code == 400
            with client.stream("POST", "/v1/completions", json=ask | {"max_tokens": 50}) as response:
                lines = response.iter_lines()
                next(lines)
                job.signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert [code for code, _ in job.ends(seconds=60)] == [0, 0], job.stop()
    finally:
        job.stop()
