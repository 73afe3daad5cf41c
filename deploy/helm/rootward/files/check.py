"""What `helm test` runs: speculation works, and it changes nothing. `check.py HOST:PORT [CA.crt [NAME]]`; exit code 0 or 1.

CA.crt: the authority of its certificate, "system" for those that the system trusts. NAME: in the certificate, if it is not HOST.

ROOTWARD_API_KEY: the key, for a gateway that asks for one. LEAST_MODELS, LEAST_DRAFTERS: so many must be there (default: one model).
"""

import os
import sys
from itertools import product

import grpc

from rootward import Client, SamplingParams, Speculation

PROMPTS = ["def fibonacci(n):", "import os\n", "class Stack:\n    def push(self, item):\n"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def credentials(authority: str) -> grpc.ChannelCredentials | None:
    if not authority:
        return None
    if authority == "system":
        return grpc.ssl_channel_credentials()
    with open(authority, "rb") as file:
        return grpc.ssl_channel_credentials(file.read())


def main(url: str, authority: str = "", name: str = "") -> int:
    accepted = 0
    options = {"grpc.ssl_target_name_override": name} if name else {}
    key = os.environ.get("ROOTWARD_API_KEY")
    with Client(url, api_key=key, timeout=120.0, tls=credentials(authority), channel_options=options) as client:
        info = client.server_info()
        served, drafters = info.models, [one for one in info.drafters if one.ready]
        for kind, there, variable in (("model", served, "LEAST_MODELS"), ("drafter", drafters, "LEAST_DRAFTERS")):
            least = int(os.environ.get(variable, kind == "model"))
            if len(there) < least:
                names = ", ".join(one.name for one in there) or "none"
                print(f"{kind}s: {names}; the release has {least} or more: look at the pods that are not ready")
                return 1
        mode = "required" if drafters and len(served) == 1 else "auto"  # of several models some may have no drafters
        for model, prompt in product([model.name for model in served], PROMPTS):
            plain = client.generate(prompt, sampling=GREEDY, speculation=Speculation(mode="disabled"), model=model)
            drafted = client.generate(prompt, sampling=GREEDY, speculation=Speculation(mode=mode), model=model)
            if plain.text != drafted.text:
                print(f"NOT LOSSLESS: {model} on {prompt!r}:\n plain   {plain.text!r}\n drafted {drafted.text!r}")
                return 1
            accepted += drafted.speculation.num_accepted_draft_tokens
    print(
        f"greedy text equals plain decoding on {len(PROMPTS)} prompts of {len(served)} models; {accepted} draft tokens were accepted"
    )
    if drafters and not accepted:
        print("no draft token was accepted: check that the draft model suits the target")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
