"""Models of the Hugging Face hub by name: pinned to a commit, and read from the hub's own cache.

The first file that is asked for, config.json, tells the commit of a revision; all others are
downloaded by that commit, so a push in between cannot mix two versions. A run writes the commit
into its config.yml, so a resume and another machine read the same files. Only files that are read
are downloaded. If the hub cannot be asked, the cache answers, with a warning; a pinned model whose
weights are all there asks nobody.
"""

import concurrent.futures
import functools
import logging
import os
import re
from pathlib import Path

from maxstack.config.compose import presets_dir
from maxstack.data.copies import local_folder
from maxstack.data.gguf.folder import folder_of, is_gguf
from maxstack.errors import ConfigError, DataError, installing, shortened
from maxstack.strict_json import read_object

log = logging.getLogger(__name__)

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w.-]+(?:/[\w.-]+)*))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
PINNED = re.compile(r"(?P<model>[A-Za-z0-9][\w.-]*/[\w.-]+@[0-9a-f]{40})(/(?P<file>[\w.-]+))?")
"""Org/Name@COMMIT, or a file of it."""
NOWHERE = (
    "no such folder or .gguf file, and no name of a model of the hub, which is Org/Name or "
    "Org/Name@REVISION"
)
SHARD = re.compile(r"(?!.*\.\.)\w[\w.-]*\.safetensors", re.ASCII)
"""Name of a file with tensors, which is never a path."""
INDEX, SINGLE = "{}.safetensors.index.json", "{}.safetensors"
"""Names of the files with weights, by their beginning."""
MODEL, DIFFUSERS = "model", "diffusion_pytorch_model"
"""Beginnings, of transformers' files and of diffusers'."""
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION = "generation_config.json"
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""Files that say how pictures become pixels; transformers may write the first into the second."""
SMALL = (
    *("config.json", INDEX.format(MODEL), INDEX.format(DIFFUSERS), GENERATION),
    *(PREPROCESSOR, PROCESSOR, *TOKENIZER),
)
"""Files that are read of a model beside its weights."""
READ = "*.json", "model*.safetensors", "tokenizer*", "merges.txt"
"""Patterns of the files that are read of nearly every model; without consolidated.safetensors,
which holds the same weights again."""
FURTHER = "additional_chat_templates"
"""Folder of chat templates beside the default one, each named as its file."""
AT_ONCE = 8


def is_model_name(path: str | Path) -> bool:
    """Return True if a text names a model of the hub, Org/Name or Org/Name@REVISION, and no folder
    or GGUF file."""
    named = NAME.fullmatch(str(path)) is not None and not is_gguf(path)
    return named and not os.path.isdir(path)


def pin_commit(name: str) -> str:
    """Return Org/Name@COMMIT of a model's present commit."""
    return f"{name.partition('@')[0]}@{download_snapshot(name, weights=False).name}"


def resolve_file(path: str) -> str:
    """Return the path itself, with {configs} for the folder of presets, or that of a file of the
    cache where `path` is Org/Name@COMMIT/FILE or MODEL.gguf/FILE."""
    path = path.replace("{configs}", str(presets_dir()))
    before, name = os.path.split(path)
    if is_gguf(before):
        return str(folder_of(before) / name)
    names = PINNED.fullmatch(path)
    if names is None or not names["file"] or os.path.exists(path):
        return path
    from huggingface_hub import try_to_load_from_cache

    model, file = names["model"], names["file"]
    repo, _, commit = model.partition("@")
    cached = try_to_load_from_cache(repo, file, revision=commit)
    return (
        cached if isinstance(cached, str) else str(download_snapshot(model, weights=False) / file)
    )


def model_folder(path: str, weights: bool) -> Path:
    """Return the local folder of a model that is a folder, a GGUF file, a folder at a URL or
    Org/Name of the hub; of the latter two, files that are read are copied to a cache, safetensors
    only for `weights`."""
    if is_gguf(path):
        return folder_of(path)
    if is_model_name(path):
        return download_snapshot(path, weights)
    tensors = ("*.safetensors",) if weights else ()
    return local_folder(path, (*SMALL, *tensors), depth=1)


@functools.cache
def download_snapshot(name: str, weights: bool) -> Path:
    """Return the folder of the cache with the files of a model that are read: config.json and those
    of its tokenizer, with `weights` its safetensors too. Files that are absent are downloaded, with
    a bar. ConfigError if that cannot be done, with the command to run and the cache's path.
    """
    repo, _, revision = name.partition("@")
    revision = revision or "main"
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"{name}: no such folder, and models of the hub are downloaded by "
            f"huggingface_hub: {installing('hub')}"
        ) from None
    cached = None
    try:
        config = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=revision)
        # The library also answers None, or a mark of its own for a file that the hub does not have.
        cached = Path(config).parent if isinstance(config, str) else None
        # Such a commit never changes, so a resume needs no network.
        if cached and weights and COMMIT.fullmatch(revision) and not _missing_weights(cached):
            return cached
        first = huggingface_hub.hf_hub_download(repo, "config.json", revision=revision)
        commit = Path(first).parent.name
        # Which files a model has is asked once; trying each name would be a request each, most of
        # them 404.
        siblings = huggingface_hub.HfApi().model_info(repo, revision=commit).siblings or ()
    except (ConfigError, DataError):
        raise
    except Exception as error:  # each version of the library has its own of the network
        if cached is None or (weights and _missing_weights(cached)):
            raise _download_error(repo, revision, error) from error
        log.warning(
            "%s: read from %s, as the hub could not be asked: %s", name, cached, _first_cause(error)
        )
        return cached
    try:
        return _download(repo, commit, {sibling.rfilename for sibling in siblings}, weights)
    except (ConfigError, DataError):
        raise
    except Exception as error:
        raise _download_error(repo, commit, error) from error


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, the first cause last."""
    cause = error.__cause__ or error.__context__
    return [error, *(_causes(cause) if cause else ())]


def _first_cause(error: BaseException) -> str:
    """Return the message of the first cause that has one, as a line."""
    messages = [" ".join(str(cause).split()) for cause in _causes(error)]
    return shortened(([type(error).__name__, *filter(None, messages)])[-1], 300)


def _download(repo: str, commit: str, files: set[str], weights: bool) -> Path:
    from huggingface_hub import hf_hub_download

    get = functools.partial(hf_hub_download, repo, revision=commit)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        # Names come from the hub, so none may lead out of the folder.
        templates = {name for name in files if re.fullmatch(rf"{FURTHER}/[\w-]+[.]jinja", name)}
        small = sorted(files.intersection(SMALL))
        folder = Path([*pool.map(get, [*small, *templates])][0]).parent
        if weights:
            # Pickles of torch run code when they are opened, so they are no substitute.
            if not {INDEX.format(MODEL), SINGLE.format(MODEL)} & files:
                raise ConfigError(
                    f"{repo}: has no safetensors on the hub, and maxstack reads "
                    "nothing else; choose another version of the model"
                )
            # After the small files, since the index names the shards.
            [*pool.map(get, _missing_weights(folder))]
    return folder


def _missing_weights(folder: Path) -> list[str]:
    """Return the files with weights that are not in the folder yet; names that are no shard's are
    refused by those who read the folder."""
    index = folder / INDEX.format(MODEL)
    names = (
        sorted({*read_weight_map(index).values()}) if index.is_file() else [SINGLE.format(MODEL)]
    )
    # A name comes from a file of others and must not become a path.
    return [name for name in names if SHARD.fullmatch(name) and not (folder / name).is_file()]


def read_weight_map(index: Path) -> dict[str, str]:
    """Read the index of a model: tensor -> file. DataError if it is damaged."""
    files = read_object(index).get("weight_map")
    if (
        not isinstance(files, dict)
        or not files
        or not all(isinstance(file, str) for file in files.values())
    ):
        raise DataError(f"{index}: weight_map is not a mapping of tensors to files")
    return files


def _download_error(repo: str, revision: str, error: Exception) -> ConfigError:
    """Return the cause of a failed download; where one can work, its command and the cache's
    path."""
    from huggingface_hub import constants, errors

    page, log_in = f"{constants.ENDPOINT}/{repo}", "`hf auth login` (or HF_TOKEN)"
    only = " ".join(f"--include '{pattern}'" for pattern in READ)
    command = f"`hf download {repo} --revision {revision} {only}`"
    download = f". {command} downloads it into the cache, {constants.HF_HUB_CACHE}"
    elsewhere = "where there is a network, and bring the cache here (HF_HUB_CACHE says where)"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        problem = f"is gated: ask for access at {page}, and log in with {log_in}{download}"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem = f"has no revision {revision}; {page}/commits lists them"
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = (
            f"no such folder, and no model at {page}; check the name, or, if it is a private "
            f"one, log in with {log_in}"
        )
    elif status == 404:
        problem = f"has no config.json at {page}, so it is no model that maxstack can read"
    elif status in (401, 403):
        problem = f"{page} answers {status}: log in with {log_in}{download}"
    elif isinstance(error, errors.HFValidationError):
        problem = f"no such folder, and no name that the hub allows: {_first_cause(error)}"
    elif any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in _causes(error)):
        problem = (
            f"no such folder, and HF_HUB_OFFLINE is set while the model is not (or not all) in "
            f"the cache, {constants.HF_HUB_CACHE}: unset it, or run {command} {elsewhere}"
        )
    else:
        problem = (
            f"no such folder, and cannot be downloaded from {page} ({_first_cause(error)}); "
            f"download it {elsewhere}{download}"
        )
    return ConfigError(f"{repo}: {problem}")
