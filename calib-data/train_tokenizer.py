#!/usr/bin/env python3
"""Train the byte-level BPE tokenizer of the small model (vocabulary 2048).

    train_tokenizer.py --text train.txt --out model

Writes tokenizer.json and tokenizer_config.json.
"""

import argparse
import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
BOS, EOS = "<|bos|>", "<|eos|>"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "model")
    parser.add_argument("--vocab", type=int, default=2048)
    args = parser.parse_args()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = args.text.read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, bos_id)],
    )

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    print(f"vocabulary {tokenizer.get_vocab_size()}, {len(ids)} training tokens, "
          f"{len(text.encode()) / len(ids):.3f} bytes/token")


if __name__ == "__main__":
    main()
