"""TRL's GRPO with a real tool on a tiny random model, watched slice by slice. Runs on a CPU in half a minute.

    pip install 'pyrlstats[torch,trl,tensorboard]'
    python examples/trl_grpo_tool.py --out run
    tensorboard --logdir run

The model sees a sum and may call a calculator; it is paid by the largest result that it gets. Its words are whole
calls, so that even a random model calls the tool. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from pyrlstats import SliceStats
from pyrlstats.integrations.trl import attach
from pyrlstats.sinks import JsonlSink, Sinks, TensorBoardSink

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


def reward(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """The largest result of the calculator, 0 to 1."""
    results = [[int(message["content"]) for message in one if message["role"] == "tool"] for one in completions]
    return [max(one, default=0) / (2 * LARGEST) for one in results]


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
            per_device_train_batch_size=32,
            num_generations=8,
            steps_per_generation=4,  # batches are used for up to four optimizer steps: there is something to see
            max_completion_length=32,
            max_tool_calling_iterations=2,
            learning_rate=1e-2,
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)  # would print every key of every step

    sinks = Sinks.on_main_rank(
        lambda: [JsonlSink(arguments.out / "rl.jsonl"), TensorBoardSink(arguments.out / "histograms")]
    )

    def on_stats(stats: dict[str, SliceStats], mode: str, step: int) -> None:
        sinks.write(step, {f"{mode}/{ratio}/": one for ratio, one in stats.items()})
        if step % 10 == 0:
            before, after = (stats["learner_vs_old"][name] for name in ("pre_tool", "post_tool"))
            print(
                f"step {step:3d}   p99 of |log-ratio|: pre_tool {before.abs_quantile(0.99):.3f}, "
                f"post_tool {after.abs_quantile(0.99):.3f}   effective sample size: "
                f"{before.ess_fraction:.1%}, {after.ess_fraction:.1%}"
            )

    handle = attach(trainer, on_stats=on_stats)  # the one line
    trainer.train()
    sinks.close()

    print(handle.latest["train"]["learner_vs_old"])
    rewards = [logs["reward"] for logs in trainer.state.log_history if "reward" in logs]
    print(f"reward: {rewards[0]:.2f} at the first batch, {rewards[-1]:.2f} at the last")
    print(f"{arguments.out / 'rl.jsonl'}: every statistic of every step. tensorboard --logdir {arguments.out}")
    for what, count in {**handle.failures, **sinks.failures}.items():
        if count:
            print(f"failed {count} times: {what}")


if __name__ == "__main__":
    main()
