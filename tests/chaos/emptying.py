"""A node that lost all it kept, and was repaired before it was asked again."""

import asyncio
import shutil
from collections.abc import Callable
from random import Random

from scripts.cluster_nodetool import nodetool
from scripts.cluster_process import ServerProcess
from tests.chaos.site import Site


async def empty_and_repair(site: Site, random: Random, say: Callable[[str], None]) -> None:
    """Empty a node, repair it, and kill another one, so that the first must do for it.

    No process of the service may run: until it is repaired, the node would be asked as if it knew
    everything, and two of three would be no quorum any more.
    """
    emptied, killed = random.sample(site.cluster.cassandra, 2)
    say(f"empty {emptied.name}, repair it, kill {killed.name}")
    await asyncio.to_thread(_empty, emptied, site.keyspace)
    for keyspace in (site.keyspace, f"{site.keyspace}_default"):
        await asyncio.to_thread(nodetool, emptied, "repair", "--full", keyspace)
    await asyncio.to_thread(killed.kill)


def _empty(node: ServerProcess, keyspace: str) -> None:
    node.stop()
    folder = node.log.parent
    tables = [path for path in (folder / "data").iterdir() if path.name.startswith(keyspace)]
    if not tables:
        raise FileNotFoundError(f"{node.name} keeps nothing of {keyspace}")
    for path in (*tables, folder / "commitlog", folder / "hints"):
        shutil.rmtree(path)
    node.start()
