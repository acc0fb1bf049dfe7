"""Descriptions of the commands, which `--help` shows."""

TRAIN = """\
Trains the tasks of a gin config together on one frozen backbone, and exports a
Hugging Face PEFT adapter for each task. Without a config it runs the bundled
demo.

If training is interrupted, the same command continues it.

With --watch=DIR it serves tenants instead: it trains the tasks of JSON files
DIR/TENANT/NAME.json as they come, change and go, until a signal stops it.
NAME.status.json beside each file tells what has become of the task. The config
sets serve.backbone and other options of the server, but no tasks.

Exit codes:
  0         no task failed
  1         a task failed, and the others are finished
  2         the config or the data was refused; nothing was trained
  3         the run broke, for example on a full disk; the same command
            continues from the last checkpoint
  130, 143  stopped by Ctrl-C or SIGTERM; the same command continues
"""
CONFIG = """\
a config:
  fine_tune.backbone = "/models/Llama-3.2-1B"
  fine_tune.tasks = [@billing/Task(), @support/Task()]

  billing/Task.name = "billing"
  billing/Task.data = "billing.jsonl"
  billing/Task.epochs = 3
  billing/Task.adapter = @billing/LoRA()
  billing/LoRA.rank = 8
  ...

Paths are relative to the working directory. `python -c "import jaxmux;
help(jaxmux.Task)"` shows the parameters of a task and their defaults; likewise
jaxmux.fine_tune, RunOptions, LoRA, AdamW, Schedule, DPO, Source and Sweep.

a config for --watch:
  serve.backbone = "/models/Llama-3.2-1B"
  serve.reserved_slots = 16
  serve.reserved_rank = 32
  TenantLimits.steps = 20000

`python -c "import jaxmux.runs; help(jaxmux.runs.ServerOptions)"` shows all
options of a server; likewise TenantLimits, the most that a tenant may ask for.
"""
UI = """\
Shows a training run on a web page of this machine: losses, speed, memory, what
the microbatches held, tasks and events. The page follows the run while it
trains, and shows runs that have ended. It only reads. RUN_DIR may also be the
folder of a server (`jaxmux train --watch`). It prints the address of the page,
and serves it until Ctrl-C.
"""
PLAN = """\
Plans the training of a gin config's tasks without training anything, and shows
which tasks share microbatches, the shape of the microbatches, and the predicted
time of a round. The devices need not exist. It reads and tokenizes the data; of
the backbone it reads config.json and the tokenizer. Without a config it plans
the bundled demo.

With --fits=GIB it shows instead what fits on one device with so much memory:
formats of the backbone, tokens of a microbatch and numbers of tasks. It reads
no data, and of the backbone only config.json. Each task is as large as the
largest of the config, and without tasks a LoRA of rank 16 on all linears with
AdamW.

Exit code 2: the config, the data or an option was refused.
"""
DATA = """\
Shows what the tasks of a gin config train on: their samples or pairs as the
model sees them, with the tokens that carry loss, the lengths and shares of
their sources, what is cut or left out, and how samples lie in the rows of a
microbatch. It reads and tokenizes all data, as training does before it begins;
of the backbone it reads config.json and the tokenizer. Without a config it
shows the bundled demo.

Exit code 2: the config, the data or an option was refused.
"""
PROFILE = """\
Measures the time and the memory of layers, attention, head, optimizer updates,
rounds and collectives on this machine's devices, for one backbone with random
weights, and writes the profile to which the planner's cost models are fitted.
If it is interrupted, the same command continues it.

With --check it measures training steps that are not in a profile and compares
them with the predictions of the cost models.
"""
EVAL = """\
Compares adapters with the bare backbone on held-out data: the loss per target
token as training measures it, the perplexity, and the part of the samples of
which the greedy completion equals the reference (of a chat, what the assistant
says last). Of tasks with pairs the loss is the value of their objective, and
the part of the pairs whose chosen answer has the higher reward is shown too. Of
labelled answers, the desirable ones are completed.

With --run_dir, tasks are evaluated on their own held-out data, unless --data
names files. Their fields, masks and lengths are those of the tasks.
"""
SCORE = """\
Computes how probable the samples of data files are under the bare backbone and
under adapters, and writes one JSON object a line. Several adapters are computed
together. Of preference records, both answers are scored, and of labelled
answers the label is repeated.

With --run_dir, tasks are scored on their own held-out data, unless --data names
files, and samples are read as those of the task. Without --run_dir and
--adapter, only the backbone is scored.
"""
SCORE_LINE = """\
a line:
  adapter        its name; null for the bare backbone
  data           name of the file; its path if several files have the name
  record         index of the record in the file, from 0
  answer         "chosen" or "rejected"; of preference records only
  label          true or false; of labelled answers only
  log_prob       sum over the target tokens, which count in the loss, in nats
  target_tokens  number of these tokens
  mean           log_prob / target_tokens
  tokens         with --tokens: ids of all tokens of the sample
  targets        with --tokens: whether each token is a target
  log_probs      with --tokens: of each token, given those before it; the first
                 is null

Numbers that are not finite are null. A sample has a line of the backbone, and
behind it one for each adapter. If an adapter has a tokenizer or a chat template
of its own, its lines follow the backbone's lines for the same tokens.
"""
GENERATE = """\
Completes prompts with a backbone and with adapters, each of which completes
every prompt: jaxmux's own folders, Hugging Face PEFT's, or all adapters of a
run. All completions are computed together.

A prompt is passed as it is; for an adapter that was trained on chats,
--template renders it as a chat. --chat begins a conversation with every
adapter. Chats are rendered by the template in an adapter's folder, or if it
has none, by that of the backbone's tokenizer.
"""
