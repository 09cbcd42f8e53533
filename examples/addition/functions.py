"""A reward and a generate function for the addition task. Both have the form that Miles gives such
functions; where Miles is not installed, Tandem stands in for the modules imported here.

    tandem train … --custom-rm-path examples.addition.functions.reward --reward-key score \
                   --custom-generate-function-path examples.addition.functions.two_tries
"""

import re

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_utils.generate_endpoint_utils import (
    compute_prompt_ids_from_sample,
    compute_request_payload,
    update_sample_from_response,
)
from miles.utils.http_utils import post

WRONG = "\n<|im_start|>user\nThat is wrong. Try again.<|im_end|>\n<|im_start|>assistant\n"


def last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d+", text)
    return numbers[-1] if numbers else None


def reward(args, sample) -> dict:
    """1 if the last number of the answer is the label; beside it whether there is one at all."""
    number = last_number(sample.response)
    return {"score": float(number == sample.label), "has_number": float(number is not None)}


async def two_tries(input: GenerateFnInput) -> GenerateFnOutput:
    """One answer, and a second one after a wrong first. The words between them are not the model's:
    their loss mask is 0."""
    args, sample = input.args, input.sample
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = compute_prompt_ids_from_sample(input.state, sample)
    for turn in range(2):
        payload, halt = compute_request_payload(args, sample.tokens, input.sampling_params)
        if payload is None:
            sample.status = halt
            break
        output = await post(url, payload)
        await update_sample_from_response(args, sample, payload, output, update_loss_mask=True)
        if turn == 1 or last_number(output["text"]) == sample.label:
            break
        words = input.state.tokenizer.encode(WRONG)
        sample.tokens = sample.tokens + words
        sample.response += WRONG
        sample.response_length += len(words)
        sample.loss_mask += [0] * len(words)
        sample.rollout_log_probs += [0.0] * len(words)
    return GenerateFnOutput(samples=sample)
