"""What `helm test` runs: speculation works, and it changes nothing. `check.py HOST:PORT [CA.crt [NAME]]`; exit code 0 or 1.

CA.crt: the authority of its certificate, "system" for those that the system trusts. NAME: in the certificate, if it is not HOST.

ROOTWARD_API_KEY: the key, for a gateway that asks for one.
"""

import os
import sys

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
        pools = client.server_info().drafters
        for prompt in PROMPTS:
            plain = client.generate(prompt, sampling=GREEDY, speculation=Speculation(mode="disabled"))
            drafted = client.generate(
                prompt, sampling=GREEDY, speculation=Speculation(mode="required" if pools else "auto")
            )
            if plain.text != drafted.text:
                print(f"NOT LOSSLESS on {prompt!r}:\n plain   {plain.text!r}\n drafted {drafted.text!r}")
                return 1
            accepted += drafted.speculation.num_accepted_draft_tokens
    print(f"greedy text equals plain decoding on {len(PROMPTS)} prompts; {accepted} draft tokens were accepted")
    if pools and not accepted:
        print("no draft token was accepted: check that the draft model suits the target")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
