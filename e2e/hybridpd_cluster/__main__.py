"""Command line: `python3.11 -m hybridpd_cluster up|down|status|images|exec` with PYTHONPATH=e2e."""

import argparse
import sys

from hybridpd_cluster import images, lifecycle
from hybridpd_cluster.errors import ClusterError
from tooling.binaries import BinariesError


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridpd_cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="bring the cluster up; prints the export lines for a shell")
    commands.add_parser("down", help="end the cluster and remove its traces")
    commands.add_parser("status", help="0 usable, 1 down, 2 in between")
    build = commands.add_parser("images", help="build the images and give them to the cluster")
    build.add_argument("--build-only", action="store_true", help="build without a running cluster")
    inside = commands.add_parser("exec", help="run a command inside the node")
    inside.add_argument("words", nargs=argparse.REMAINDER)
    return parser


def main() -> int:
    """Runs one command; its result is the exit status."""
    arguments = _arguments().parse_args()
    try:
        match arguments.command:
            case "up":
                lifecycle.up()
                lifecycle.announce()
            case "down":
                lifecycle.down()
            case "status":
                return lifecycle.status()
            case "images":
                images.ensure(give_to_cluster=not arguments.build_only)
            case "exec":
                return lifecycle.shell(arguments.words)
    except (ClusterError, BinariesError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
