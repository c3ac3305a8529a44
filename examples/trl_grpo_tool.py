"""TRL's GRPO with a real tool on a tiny random model, watched slice by slice. Runs on a CPU in about two minutes.

    pip install 'pyrlstats[trl]' tensorboard
    python examples/trl_grpo_tool.py --out run
    tensorboard --logdir run        # train/rl/learner_vs_old/post_tool/abs_log_ratio_p99, ...

The model sees ``3+1=`` and may call a calculator; it is paid for calling it with the right sum. Its words are whole
calls, so that even a random model calls the tool. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from pyrlstats import SliceStats
from pyrlstats.integrations.trl import attach

LARGEST = 4  # operand
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
ROLES = ["user\n", "assistant\n", "tool\n"]
CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}+{}"}}}}</tool_call>'
CALLS = [CALL.format(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]

CHAT_TEMPLATE = r"""
{%- for message in messages -%}
<|im_start|>{{ message.role + '\n' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>{{ 'assistant\n' }}{%- endif -%}
""".strip()

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def calculator(expression: str) -> str:
    """Adds two numbers.

    Args:
        expression: The sum to calculate, such as 3+1.

    Returns:
        The result.
    """
    first, second = expression.split("+")
    return str(int(first) + int(second))


def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """1 for a call with the right sum, a tenth of it for any call."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        calls = [call for message in completion for call in message.get("tool_calls") or []]
        right = prompt[-1]["content"].rstrip("=")
        asked = [call["function"]["arguments"].get("expression") for call in calls]
        rewards.append(1.0 if right in asked else 0.1 if asked else 0.0)
    return rewards


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *ROLES, *CALLS, *"0123456789+-*= "]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in (*ROLES, *CALLS)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template, fast.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int = 16, seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    # a call ends the model's turn, as an end-of-message token would
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(CALLS)]
    return model


def make_dataset() -> Dataset:
    sums = [f"{a}+{b}=" for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": one}] for one in sums]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trl_run"), help="folder of the logs")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    tokenizer = make_tokenizer()
    trainer = GRPOTrainer(
        model=make_model(tokenizer, hidden=32),
        processing_class=tokenizer,
        reward_funcs=reward,
        tools=[calculator],
        train_dataset=make_dataset(),
        args=GRPOConfig(
            output_dir=str(arguments.out),
            report_to=["tensorboard"],
            logging_steps=1,
            save_strategy="no",
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            num_generations=8,
            steps_per_generation=4,  # batches are used for up to four optimizer steps: there is something to see
            max_completion_length=32,
            max_tool_calling_iterations=2,
            learning_rate=1e-2,
            use_cpu=True,
        ),
    )

    with (arguments.out / "rl.jsonl").open("w") as file:

        def write(stats: dict[str, SliceStats], mode: str, step: int) -> None:
            for ratio, one in stats.items():
                file.write(json.dumps({"step": step, "mode": mode, **one.to_dict(f"{ratio}/")}) + "\n")
            file.flush()

        handle = attach(trainer, on_stats=write)  # the one line
        trainer.train()

    print(handle.latest["train"]["learner_vs_old"])
    print(f"every statistic of every step: {arguments.out / 'rl.jsonl'}; failures: {handle.failures or 'none'}")


if __name__ == "__main__":
    main()
