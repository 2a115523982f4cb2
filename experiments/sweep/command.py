"""experiment.py sweep"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs

from common.arguments import UsageError, option
from common.errors import printable, printable_lines
from experiments.shared.pool_options import PoolOptions

if TYPE_CHECKING:
    from experiments.sweep.sweep_file import Sweep
    from experiments.sweep.variant_runs import VariantRun


@attrs.frozen(kw_only=True)
class SweepCommand:
    """Train variants of a run over seeds, and tell differences from luck."""

    file: Annotated[Path, option("sweep file: base, levers, seeds", name="FILE")] = attrs.field(kw_only=False)
    output: Annotated[Path | None, option("default: the file's name without .json", "DIR")] = None
    pool: PoolOptions = attrs.field(factory=PoolOptions)
    dry_run: Annotated[bool, option("print the runs and what their number can find; train nothing")] = False
    print_commands: Annotated[
        bool, option("write the run directories and print a command for each run, for Slurm or several machines")
    ] = False
    collect: Annotated[bool, option("print the table of what is there; train nothing")] = False

    def __attrs_post_init__(self) -> None:
        if self.dry_run + self.print_commands + self.collect > 1:
            raise UsageError("--dry-run, --print-commands and --collect exclude each other")

    def run(self) -> int | None:
        """Train what is missing, and print the table."""
        from common.errors import BadInput
        from experiments.shared.experiment_files import check_results, missing_tokens, output_of
        from experiments.sweep.halving import check_rungs
        from experiments.sweep.sweep_file import read_sweep
        from experiments.sweep.variant_runs import check_variants, describe_runs, runs_of, shell_commands, write_runs
        from training.hardware.usable_gpus import choose_device

        sweep = read_sweep(self.file)
        output = output_of(self.file, self.output)
        check_results(output, "sweep")
        missing = missing_tokens(sweep.file, sweep.variants[0].run.train)
        runs = runs_of(sweep, output, self.pool.ranks)
        if not self.collect:
            check_rungs(sweep, runs)
            check_variants(sweep, runs, None if self.print_commands else choose_device(self.pool.device))
        if self.dry_run:
            lines = [*describe_runs(sweep, runs, self.pool), *([f"WARNING: {missing}"] if missing else [])]
            print("\n".join(map(printable, lines)))
        elif self.print_commands:
            commands = shell_commands(sweep, runs, self.pool)
            write_runs(runs)
            print("\n".join(commands))
        elif self.collect:
            if not output.is_dir():
                raise BadInput(f"{output}: nothing trained there yet; train the sweep, or pass its --output")
            self._finish(sweep, runs, output)
        elif missing is not None:
            raise BadInput(missing)
        else:
            return self._train(sweep, runs, output)
        return None

    def _train(self, sweep: "Sweep", runs: "list[VariantRun]", output: Path) -> int | None:
        from common.errors import EXIT_STOPPED
        from experiments.shared.run_pool import PoolStopped, RunPool
        from experiments.sweep.halving import train_sweep
        from experiments.sweep.variant_runs import write_runs

        write_runs(runs)
        with RunPool(output, self.pool) as pool:
            try:
                train_sweep(pool, sweep, runs)
            except PoolStopped as stopped:
                self._finish(sweep, runs, output)
                print(printable_lines(f"\nexperiment.py: {stopped}"))
                return EXIT_STOPPED
            self._finish(sweep, runs, output)
        return None

    def _finish(self, sweep: "Sweep", runs: "list[VariantRun]", output: Path) -> None:
        """Write the table, and print it."""
        from experiments.sweep.halving import stopped_variants
        from experiments.sweep.sweep_table import SweepTable
        from experiments.sweep.variant_runs import results_of

        table: SweepTable = SweepTable.of(sweep, results_of(sweep, runs, stopped_variants(sweep, runs)))
        try:
            path = table.write(output)
        finally:  # it may be all that there is
            print(printable_lines(table.text()), flush=True)
        print(printable_lines(f"\n{path}"), flush=True)
