"""Planning without a model: which schedule suits a 24-layer transformer on 8 devices?

Needs no TensorFlow.  Prints a table, and writes plan_only.html (open it in a browser),
plan_only.png and plan_only.txt, the schedule, for ``tf-ooo simulate``.
"""

import tf_ooo
from tf_ooo.costs.devices import device
from tf_ooo.costs.models import model_costs

GB = 10**9

# Seconds and bytes of each layer for one micro-batch of 2 sequences, from formulas; Adam has two slots.
v100 = device("v100-fp16").derated(flop_share=0.4)
layers = model_costs("transformer", v100, slots=2, layers=24, hidden=2048, heads=16, seq=1024, microbatch=2)
# A layer by hand: the output layer of 32,000 words.
head = tf_ooo.LayerCosts(
    forward_s=5.4e-3, output_grad_s=5.4e-3, weight_grad_s=5.4e-3, update_s=1e-3,
    activation_bytes=8_388_608, weight_bytes=131_072_000, slot_bytes=262_144_000, name="head",
)  # fmt: skip
layers = (*layers, head)
link = tf_ooo.Link(latency_s=20e-6, bytes_per_s=25e9 / 8)

problem = {
    "layers": layers, "devices": 4, "microbatches": 8, "link": link, "memory_limit_bytes": 12 * GB,
}  # fmt: skip

print(f"{len(layers)} layers, 4 devices of 12 GB, 8 micro-batches, 25 Gbit/s\n")
print("schedule            step   bubble   peak memory")
for name in ("gpipe", "1f1b", "fast_forward", "zb_h1", "zb_v", "auto"):
    try:
        schedule = tf_ooo.plan(schedule=name, **problem)
    except tf_ooo.MemoryLimitError as error:
        print(f"{name:<16} needs {error.smallest_bytes / GB:.1f} GB on a device")
        continue
    timeline = tf_ooo.simulate(schedule, layers, link)
    peak_gb = max(timeline.peak_bytes) / GB
    print(f"{name:<16} {timeline.makespan_s:6.3f} s  {timeline.bubble_fraction:6.1%}  {peak_gb:7.2f} GB")

print(f"\nauto took {schedule.policy}")
timeline.save_html("plan_only.html")
timeline.save_png("plan_only.png")
with open("plan_only.txt", "w") as file:
    file.write(schedule.to_text())
print("\nwrote plan_only.html, plan_only.png, plan_only.txt")
