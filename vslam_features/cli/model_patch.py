"""``models patch``: what can be done to the graph of a model file; each patch is a module."""

from __future__ import annotations

import argparse

from ..errors import PluginError
from . import model_patch_bf16_attention, model_patch_cumsum, model_patch_early_stop, model_patch_file

HELP = "change the graph of a model file: early-stop, cumsum, bf16-attention"
EXAMPLE = "vslam-features models patch early-stop matcher.onnx --layers 2,4,6,8"
_PATCHES = (model_patch_early_stop, model_patch_cumsum, model_patch_bf16_attention)


def add_arguments(parser) -> None:
    """Register the patches."""
    patches = parser.add_subparsers(title="patches", metavar="PATCH", required=True, dest="patch")
    for module in _PATCHES:
        patch = patches.add_parser(
            module.NAME,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}. The file that is patched stays as it is.",
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        model_patch_file.add_options(patch)
        module.add_arguments(patch)
        patch.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
        patch.set_defaults(run_patch=module.run)


def run(args) -> int:
    """Patch and print what came of it. Raises the package's errors."""
    try:
        from ..graph import patching  # noqa: F401
    except ImportError as error:
        raise PluginError(
            f"changing graphs needs onnx and onnx-ir ({error}): pip install 'vslam_features[models]', or patch on "
            "another machine and copy the file here"
        ) from error
    return args.run_patch(args)
