"""experiment.py ladder"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs

from common.arguments import option
from common.errors import printable, printable_lines
from experiments.shared.pool_options import PoolOptions
from training.telemetry.budget import USD

if TYPE_CHECKING:
    from experiments.ladder.ladder_table import LadderTable
    from experiments.ladder.trunk import TrunkMaker


@attrs.frozen(kw_only=True)
class LadderCommand:
    """Train small sizes of a run, fit a loss law, and forecast the run's loss."""

    file: Annotated[Path, option("ladder file: target, sizes, horizons, rates", name="FILE")] = attrs.field(
        kw_only=False
    )
    output: Annotated[Path | None, option("default: the file's name without .json", "DIR")] = None
    pool: PoolOptions = attrs.field(factory=PoolOptions)
    best_for: Annotated[
        float | None, option("print the best size for this much money, too, on each machine", "USD", check=USD)
    ] = None
    dry_run: Annotated[bool, option("print the runs, their tokens and share of the target's FLOPs; train nothing")] = (
        False
    )

    def run(self) -> int | None:
        """Train what is missing, print the results, write the target's forecast."""
        from common.errors import BadInput
        from experiments.ladder.forecast import check_forecast
        from experiments.ladder.ladder_file import read_ladder
        from experiments.ladder.trunk import TrunkMaker
        from experiments.ladder.trunk_training import describe_plan
        from experiments.shared.experiment_files import check_results, missing_tokens, output_of

        ladder = read_ladder(self.file)
        missing = missing_tokens(self.file, ladder.target.train)
        maker = TrunkMaker(ladder=ladder, output=output_of(self.file, self.output), ranks=self.pool.ranks)
        check_results(maker.output, "ladder")
        check_forecast(ladder.target.directory)
        plan = describe_plan(maker, self.pool.price_per_hour)  # refuses what could not be trained before anything is
        if self.dry_run:
            print("\n".join(map(printable, [*plan, *([f"WARNING: {missing}"] if missing else [])])))
            return None
        if missing is not None:
            raise BadInput(missing)
        return self._train(maker)

    def _train(self, maker: "TrunkMaker") -> int | None:
        from common.errors import EXIT_STOPPED
        from common.files import writing
        from experiments.ladder.forecast import write_forecast
        from experiments.ladder.ladder_table import conclude
        from experiments.ladder.loss_law import NoForecast
        from experiments.ladder.trunk_training import best_rate, size_trunks, train_trunks, tune_rate
        from experiments.shared.experiment_files import remove_results
        from experiments.shared.run_pool import PoolStopped, RunPool

        with writing(maker.output):
            maker.output.mkdir(parents=True, exist_ok=True)
        try:
            with RunPool(maker.output, self.pool) as pool:
                rates = tune_rate(pool, maker)
                trunks = size_trunks(maker, best_rate(rates))
                train_trunks(pool, trunks, branches=True)
            table = conclude(maker.ladder, rates, trunks, self.best_for)
        except PoolStopped as stopped:
            print(printable(f"experiment.py: {stopped}"))
            return EXIT_STOPPED
        except NoForecast:
            write_forecast(maker.ladder.target.directory, None)
            remove_results(maker.output, "ladder")
            raise
        self._finish(table, maker.output)
        return None

    def _finish(self, table: "LadderTable", output: Path) -> None:
        """Write the table and the forecast, and print them. Raises BadInput without one."""
        from common.errors import BadInput
        from experiments.ladder.forecast import write_forecast

        try:
            written, path = table.write(output), write_forecast(table.ladder.target.directory, table.forecast)
        finally:  # it may be all that there is
            print(printable_lines(table.text()), flush=True)
        print(printable_lines(f"\n{written}: this table"), flush=True)
        if table.refused is not None:
            raise BadInput(f"{self.file}: {table.refused}; all results are in {output}")
        print(printable(f"{path}: shown by train.py {table.ladder.target.directory} --plan"))
