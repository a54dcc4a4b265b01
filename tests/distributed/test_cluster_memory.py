"""Whether memory_limit_bytes holds, as the workers' allocators count it."""

import pytest

from tests.distributed.clusters import addresses, heard, kill, start_client
from tf_ooo.bench.pipeline import workers


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deep", "wide", "tied"])
def test_measured_peaks_stay_within_the_limit(model, tmp_path):
    cluster = addresses(2)
    with workers(cluster, 2, str(tmp_path)) as processes:
        of_workers = ",".join(map(str, processes))
        client = start_client(cluster, of_workers, tmp_path, model, script="cluster_memory.py")
        free, tight, between = heard(client), heard(client), heard(client)
        kill(client)
    for one in (tight, between):
        assert max(one["measured"]) <= one["limit"]
        assert one["before"] == [0, 0]  # a fit leaves nothing on the workers
    if model == "deep":
        assert max(free["measured"]) > tight["limit"]
