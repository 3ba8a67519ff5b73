"""``memsave predict``: the classes of images and texts by a trained model, and the continuation of prompts."""

import argparse
import json


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("folder", metavar="FOLDER", help="a run's --output_dir, its final/, or a folder of a model")
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="image files or folders of them; or texts or prompts, and a .txt or .jsonl with one a line",
    )
    parser.add_argument("--top_k", type=int, default=5, metavar="K", help="most probable classes; default: 5")
    parser.add_argument("--max_new_tokens", type=int, default=60, metavar="N", help="of a continuation; default: 60")
    parser.add_argument("--text_column", default="text", metavar="NAME", help="in a .jsonl; default: text")
    parser.add_argument("--text_pair_column", metavar="NAME", help="of the second text, in a .jsonl of pairs")
    parser.add_argument("--no_chat", action="store_true", help="continue prompts as text, not as a user's messages")
    parser.add_argument("--batch_size", type=int, default=8, metavar="N", help="inputs of a forward; default: 8")
    parser.add_argument("--device", metavar="DEVICE", help="such as cpu or cuda:1; default: a GPU where there is one")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with the model")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line in place of the table")
    parser.set_defaults(command=_predict)


def _predict(arguments: argparse.Namespace) -> None:
    from memsave_recipes.inference import PredictArguments, load_on, predict, read_inputs
    from memsave_recipes.render.predictions import show

    flags = PredictArguments(
        batch_size=arguments.batch_size,
        top_k=arguments.top_k,
        max_new_tokens=arguments.max_new_tokens,
        text_column=arguments.text_column,
        text_pair_column=arguments.text_pair_column,
        chat=False if arguments.no_chat else None,
    )
    saved = load_on(arguments.device, arguments.folder, trust_remote_code=arguments.trust_remote_code)
    rows = predict(saved, read_inputs(arguments.inputs, saved, flags), flags)
    if arguments.json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    else:
        show(rows)
