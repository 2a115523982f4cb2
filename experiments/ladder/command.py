"""experiment.py ladder"""

from pathlib import Path
from typing import Annotated

import attrs

from common.arguments import option
from experiments.shared.pool_options import PoolOptions
from training.planning.budget import USD


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
        from common.errors import EXIT_STOPPED, BadInput
        from common.files import writing
        from experiments.ladder.conclusion import conclude, write_forecast
        from experiments.ladder.ladder_file import read_ladder
        from experiments.ladder.ladder_plan import describe_plan, size_trunks
        from experiments.ladder.loss_law import NoForecast
        from experiments.ladder.trunk import TrunkMaker
        from experiments.ladder.trunk_training import train_trunks, tune_rate
        from experiments.shared.experiment_files import output_of, remove_results
        from experiments.shared.interior_optimum import best_rate
        from experiments.shared.run_directories import missing_tokens
        from experiments.shared.run_pool import PoolStopped, RunPool

        ladder = read_ladder(self.file)
        output = output_of(self.file, self.output)

        maker = TrunkMaker(ladder=ladder, output=output, ranks=self.pool.ranks)
        missing = missing_tokens(self.file, ladder.target.train)
        plan = describe_plan(maker, self.pool.price_per_hour)  # refuses what could not be trained before anything is
        if self.dry_run:
            print("\n".join([*plan, *([f"WARNING: {missing}"] if missing else [])]))
            return None
        if missing is not None:
            raise BadInput(missing)
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
        try:
            with RunPool(output, self.pool) as pool:
                rates = tune_rate(pool, maker)
                trunks = size_trunks(maker, best_rate(rates))
                train_trunks(pool, trunks, branches=True)
            table = conclude(ladder, rates, trunks, self.best_for)
        except PoolStopped as stopped:
            print(f"experiment.py: {stopped}")
            return EXIT_STOPPED
        except NoForecast:
            write_forecast(ladder, None)
            remove_results(output, "ladder")
            raise
        print(table.text())
        print(f"\n{table.write(output)}: this table", flush=True)
        path = write_forecast(ladder, table.forecast)
        if table.refused is not None:
            raise BadInput(f"{self.file}: {table.refused}; all results are in {output}")
        print(f"{path}: shown by train.py {ladder.target.directory} --plan")
        return None
