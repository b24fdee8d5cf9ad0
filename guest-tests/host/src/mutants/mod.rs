//! Mutation tests of the pure cores: `cargo mutants` on a copy of the tree, judged by the table `guest-tests/mutants.json`.

mod table;
mod tree;

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;

use self::table::{Core, Mutant, Outcomes, Table};
use crate::engine::error::LabError;
use crate::engine::shard::Shard;

/// The table, relative to the root of the checkout.
const TABLE: &str = "guest-tests/mutants.json";
/// The copy, its build outputs and the reports.
const OUT: &str = "target/mutants";

/// Arguments of `egm-lab mutants`.
#[derive(Debug, Args)]
pub(crate) struct MutantsArguments {
    /// Core to run, by its name in guest-tests/mutants.json; may be repeated [default: all].
    #[arg(long = "core", value_name = "NAME")]
    cores: Vec<String>,
    /// Part K of N of each core's mutants; "today" as K is the number of the day [default: all].
    #[arg(long, value_name = "K/N", value_parser = sample)]
    sample: Option<Shard>,
}

fn sample(text: &str) -> Result<Shard, String> {
    let day = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs() / 86_400);
    Shard::parse(text, Some(day))
        .ok_or_else(|| "expected K/N with 1 <= K <= N, or today/N, for instance 1/40".to_owned())
}

/// Runs the mutants; exit code 1 when a core or its table fails its check.
pub(crate) fn run(arguments: &MutantsArguments) -> Result<ExitCode, LabError> {
    let table = Table::read(Path::new(TABLE))?;
    let cores = table.cores(&arguments.cores)?;
    let tree = Path::new(OUT).join("tree");
    tree::copy(Path::new("."), &tree)?;
    let mut problems = Vec::new();
    for core in cores {
        let all = list(core, &tree)?;
        problems.extend(table.stale(core, &all));
        if all.is_empty() {
            problems.push(format!("{}: its files in {TABLE} have no mutant", core.name));
            continue;
        }
        if arguments.sample.is_some_and(|sample| sample.is_empty(all.len())) {
            println!("{}: no mutant in this sample", core.name);
            continue;
        }
        let outcomes = outcomes(core, &tree, arguments.sample)?;
        let verdict = table.judge(core, &outcomes, arguments.sample.is_none());
        println!("{}", verdict.summary);
        problems.extend(verdict.problems);
    }
    for problem in &problems {
        println!("error: {problem}");
    }
    Ok(ExitCode::from(u8::from(!problems.is_empty())))
}

/// `cargo mutants` for the files of `core` in `tree`.
fn command(core: &Core, tree: &Path) -> Result<Command, LabError> {
    let root = std::env::current_dir().map_err(LabError::file("read", "."))?;
    let mut command = Command::new("cargo");
    command.args(["mutants", "--in-place"]).stdin(Stdio::null());
    command.current_dir(tree).env("CARGO_TARGET_DIR", root.join(OUT).join("build"));
    for file in &core.files {
        command.args(["--file", file]);
    }
    Ok(command)
}

/// Every mutant of `core`.
fn list(core: &Core, tree: &Path) -> Result<Vec<Mutant>, LabError> {
    let output = command(core, tree)?.args(["--list", "--json"]).output().map_err(not_started)?;
    if !output.status.success() {
        return Err(failed(&output.status.to_string(), &String::from_utf8_lossy(&output.stderr)));
    }
    let mut mutants: Vec<Mutant> = LabError::json("cargo mutants --list", &output.stdout)?;
    for mutant in &mut mutants {
        mutant.read_line(tree)?;
    }
    Ok(mutants)
}

/// Runs the mutants of `core`, or of its sample, and reads their outcomes.
fn outcomes(core: &Core, tree: &Path, sample: Option<Shard>) -> Result<Outcomes, LabError> {
    let reports = std::env::current_dir().map_err(LabError::file("read", "."))?.join(OUT).join(&core.name);
    std::fs::create_dir_all(&reports).map_err(LabError::file("make", &reports))?;
    let mut command = command(core, tree)?;
    command.arg("--output").arg(&reports);
    if let Some(sample) = sample {
        command.args(["--sharding", "round-robin", "--shard", &sample.zero_based()]);
    }
    // Not after "--": those arguments do not apply to the build, which would then build all tests of the package.
    command.args(core.targets.iter().map(|target| format!("--cargo-arg={target}")));
    if let Some(filter) = &core.filter {
        command.args(["--", "-E", filter]);
    }
    let status = command.status().map_err(not_started)?;
    // 2: a mutant survived, 3: the tests of one ran into the time limit.
    if !matches!(status.code(), Some(0 | 2 | 3)) {
        return Err(failed(&status.to_string(), "its output is above"));
    }
    let path = reports.join("mutants.out/outcomes.json");
    let json = std::fs::read(&path).map_err(LabError::file("read", &path))?;
    let mut outcomes: Outcomes = LabError::json(path.display().to_string(), &json)?;
    for mutant in outcomes.mutants_mut() {
        mutant.read_line(tree)?;
    }
    Ok(outcomes)
}

fn not_started(source: std::io::Error) -> LabError {
    LabError::File { action: "run", path: "cargo".into(), source }
}

fn failed(status: &str, output: &str) -> LabError {
    let tail = format!("{output}\n  help: cargo install --locked cargo-mutants cargo-nextest");
    LabError::Command { command: "cargo mutants".to_owned(), status: status.to_owned(), tail }
}
