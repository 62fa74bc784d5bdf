"""Running a plan for real without its devices: layers that wait instead of computing.

    profile --emulated_profile--> profile of what is run --EmulatedModel--> capture --> Trainer

Everything but the layers' insides is the real thing: capture, stages, schedule, messages over
`torch.distributed`, gradient buckets, memory. A layer waits for its profiled seconds and makes
tensors of its profiled sizes, so a plan for many devices runs on a laptop, where waiting costs
nothing.
"""
