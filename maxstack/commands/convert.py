"""`maxstack import` and `maxstack export`: convert a Hugging Face model folder to a run's folder,
and a run or checkpoint to a model folder."""

from argparse import Namespace

from maxstack.command import ALLOW_NONFINITE, OVERRIDES, WEIGHTS, argument, command, local_folder

DTYPES = ("float32", "bfloat16", "float16")

OUT_FOLDER = argument(
    "--out",
    required=True,
    metavar="FOLDER",
    type=local_folder,
    help="output folder, must not exist",
)
CHECKPOINT = argument(
    "run",
    metavar="RUN_OR_CHECKPOINT",
    type=local_folder,
    help="run folder (its newest checkpoint), or one step in it",
)
ARCHITECTURE = argument(
    "--architecture",
    metavar="NAME",
    help="transformers class to write the folder for (default: the one that fits the model)",
)


@command(
    "import",
    "Convert a Hugging Face model folder to a run at step 0. Run the command again to resume it.",
    "import ./Qwen3-0.6B --out runs/qwen",
    argument(
        "folder",
        metavar="FOLDER",
        help="folder or URL with config.json and safetensors files, a .gguf file, or a model on "
        "the hub: Org/Name or Org/Name@REVISION",
    ),
    OVERRIDES,
    argument("--out", required=True, metavar="RUN", type=local_folder, help="run folder to create"),
    argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as in the folder)"),
    ALLOW_NONFINITE,
    on_cpu=True,
)
def import_model(args: Namespace) -> None:
    """Convert a model folder to a run at step 0. ConfigError or DataError, with nothing written,
    where the folder is refused."""
    from maxstack.convert import import_folder

    import_folder(
        args.folder,
        args.out,
        *args.overrides,
        dtype=args.dtype,
        allow_nonfinite=args.allow_nonfinite,
    )


@command(
    "export",
    "Convert a run or checkpoint to a Hugging Face model folder, which transformers loads with "
    "from_pretrained.",
    "export runs/qwen --out ./qwen-hf --dtype bfloat16",
    CHECKPOINT,
    OUT_FOLDER,
    argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the tensors (default: that of the import, otherwise that of the run)",
    ),
    argument(
        "--shard-size",
        default="5GB",
        metavar="SIZE",
        help="maximum size of a safetensors file (default: 5GB)",
    ),
    ARCHITECTURE,
    WEIGHTS,
    on_cpu=True,
)
def export_model(args: Namespace) -> None:
    """Convert a run or checkpoint to a model folder. ConfigError where transformers has no class
    for the model."""
    from maxstack.convert import export_folder

    export_folder(
        args.run,
        args.out,
        dtype=args.dtype,
        shard_size=args.shard_size,
        architecture=args.architecture,
        weights=args.weights,
    )
