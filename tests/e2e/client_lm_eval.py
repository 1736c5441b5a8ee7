"""What lm-eval finds of a server's model: run as `python client_lm_eval.py URL MODEL`; prints one JSON object.

It has no tokenizer of its own: it asks the server's.
"""

import json
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import datasets
import lm_eval

URL, MODEL = sys.argv[1:]
QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " a kind of fish"], "answer": 0},
    {"question": "Two and two make", "choices": [" yellow", " four"], "answer": 1},
    {"question": "The opposite of hot is", "choices": [" cold", " window"], "answer": 0},
]
COMMON = {
    "dataset_path": "local",
    "test_split": "test",
    "num_fewshot": 0,
    "target_delimiter": "",
    "metadata": {"version": 1},
}


def rows(**settings):
    return {"test": datasets.Dataset.from_list(QUESTIONS)}


TASKS = [
    COMMON
    | {
        "task": "choose",
        "custom_dataset": rows,
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    COMMON
    | {
        "task": "write",
        "custom_dataset": rows,
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
]
evaluated = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={"base_url": f"{URL}/v1/completions", "model": MODEL, "num_concurrent": 4, "max_length": 512},
    tasks=TASKS,
    bootstrap_iters=0,
    log_samples=True,
)
samples = evaluated["samples"]
found = {
    "accuracy": evaluated["results"]["choose"]["acc,none"],
    "scores": [[answer[0][0] for answer in sample["resps"]] for sample in samples["choose"]],
    "greedy": [[answer[0][1] for answer in sample["resps"]] for sample in samples["choose"]],
    "written": [sample["resps"][0][0] for sample in samples["write"]],
}
sys.stdout.write(json.dumps(found))
