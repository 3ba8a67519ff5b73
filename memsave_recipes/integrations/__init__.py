"""Plans for people who keep their own trainer: Trainer and TRL, Lightning, Fabric, Accelerate, and plain loops.

NOTE [ decisions ]
1. The plan is made on the trainer's first batch, right before its first forward. At this point the model is on its
   device, wrapped and resumed, and the batch is there. So nothing is taken from the data loader, its sampler or their
   random numbers. To collate rows of the data set instead would run its transforms and draw random numbers.
2. The measured forward is the trainer's own: ``compute_loss`` or ``training_step``, under its precision. Gradients,
   buffers and generators are put back by ``preserve_state``, and a trainer's own numbers (sums of metrics, say) by
   ``preserve_attributes``. So training with the plan ``none`` is bit for bit the same as without this package.
3. Later batches may be longer. If a batch has more elements than all before it, a plan for a budget is made again
   before its first forward. This happens about as often as the logarithm of the number of steps. On several ranks,
   whose batches differ, the plan stays, and a line says so.
4. Several ranks plan together, on their first batches: they get one plan, and the largest of their peaks has to fit.
5. The peak of the second step is compared with the prediction, since the optimizer has no state before. A CPU counts no
   allocations, so torch's profiler records this step, as in a recipe. On a device the allocator is asked in every step.
   In Lightning on a CPU it is the third step (``StepPeak``).
6. Other checkpointing, and everything that shards the model, is refused before anything trains.
"""
