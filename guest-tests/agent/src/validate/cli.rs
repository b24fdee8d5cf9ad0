//! The command line of `egm-guest validate`: what a person asks for, and the run.

use std::fs::File;
use std::io::Read;
use std::process::ExitCode;

use clap::Args;
use egm_address::ByteSize;
use egm_guest::findings::{RUN_VERSION, Run, Verdict};
use egm_report::show::{Screen, hanging};

use super::process::{self, Given};
use super::progress::Progress;
use super::report::Form;
use super::{Validation, all, core, find, required, select};
use crate::cmdline::Arguments;
use crate::output::Misuse;
use crate::tree::Tree;
use crate::{calendar, machine, output};

/// Largest size that is chosen without `--size`, in bytes.
const MOST: u64 = 256 << 20;
/// Smallest size that is chosen without `--size`, in bytes.
const LEAST: u64 = 1 << 20;
/// The smallest that can be asked for, in bytes: the largest page that a processor's kernel has.
const LEAST_ASKED: u64 = 64 << 10;

/// Arguments that validations take (`--arg`), each with its meaning and, after a colon, its default. Any other is
/// refused, as a typing error would go unnoticed.
const ARGUMENTS: [(&str, &str); 17] = [
    ("deadline", "seconds that each validation may take: 600"),
    ("egm.functions", "folder of PCI functions: /sys/bus/pci/devices"),
    ("memory.nodes", "NUMA nodes to try, such as 0,2"),
    ("memory.rounds", "repetitions of each measurement: 5"),
    ("memory.threads", "threads that write and read"),
    ("nvshmem.library", "library, or its folder, in place of the loader's choice"),
    ("nvshmem.pes", "processing elements: one for each GPU"),
    ("rdma.device", "RDMA device, such as mlx5_0: the first active one"),
    ("rdma.gid", "index in its GID table"),
    ("rdma.listen", "ADDRESS:PORT where rdma.pair waits for its peer"),
    ("rdma.node", "NUMA node of the memory that rdma.pair uses"),
    ("rdma.peer", "ADDRESS:PORT of the peer of rdma.pair"),
    ("rdma.requests", "requests that ib_write_bw sends"),
    ("rdma.rounds", "repetitions of each measurement: 3"),
    ("rdma.rxe", "ADDRESS/PREFIX for the interface of an rdma_rxe device"),
    ("rdma.timeout", "seconds that rdma.pair waits for its peer: 60"),
    ("turns", "Unix socket of a program that measures in turn"),
];

/// Former name of `rdma.timeout`, which is still read.
const FORMER_TIMEOUT: &str = "rdma.patience";

fn argument_names() -> impl Iterator<Item = &'static str> {
    ARGUMENTS.iter().map(|(name, _)| *name)
}

fn is_argument(key: &str) -> bool {
    argument_names().chain([FORMER_TIMEOUT]).any(|name| name == key)
}

/// Text after the options in the help of `validate`.
fn help() -> String {
    let rows = ARGUMENTS.iter().map(|(name, meaning)| format!("  {name:<16} {meaning}\n"));
    format!(
        "Arguments (--arg KEY=VALUE), with defaults after a colon:\n\n{}\n\
         Outcomes: passed; failed; skipped (this machine cannot decide it); error (the validation broke).\n\n\
         Exit codes:\n\n  0  nothing failed\n  1  something failed, or was required and skipped\n  \
         2  the command line is wrong",
        rows.collect::<String>()
    )
}

/// Arguments of `egm-guest validate`.
#[derive(Debug, Args)]
#[command(after_help = help())]
pub(crate) struct Options {
    /// Groups, names or patterns (*, ?) of validations, comma separated; -WORD excludes [default: all].
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    select: Vec<String>,
    /// Validations that must pass, written as for --select; of a group, those that --list marks. The run fails (exit 1) if
    /// one is skipped or did not run.
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    require: Vec<String>,
    /// Require all selected validations to pass; exclude one with --select -WORD.
    #[arg(long)]
    strict: bool,
    /// List the validations and the claim of each; * marks the core of a group.
    #[arg(long)]
    list: bool,
    /// Largest buffer, at least 64KiB [default: a sixteenth of the free memory, 1MiB to 256MiB].
    #[arg(long, value_name = "BYTES", value_parser = size)]
    size: Option<ByteSize>,
    /// Seed, to repeat the random choices of another run [default: random].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Argument of validations, from the list below.
    #[arg(long = "arg", value_name = "KEY=VALUE")]
    args: Vec<String>,
    #[command(flatten)]
    form: Form,
}

fn size(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|wrong: egm_address::SizeError| wrong.to_string())?;
    if size.get() < LEAST_ASKED {
        return Err(format!("a buffer has {} at least", ByteSize::new(LEAST_ASKED)));
    }
    Ok(size)
}

/// Validates; the exit code shows whether nothing failed.
pub(crate) fn main(options: &Options) -> ExitCode {
    let asked = chosen(options).map_err(Misuse::from).and_then(|(chosen, required)| {
        // Everything that may be wrong with the command line is found before the first validation runs.
        known(&options.args)?;
        let report = if options.list { None } else { Some(options.form.open()?) };
        Ok((chosen, required, report))
    });
    match asked {
        Err(wrong) => output::misused(&wrong),
        Ok((chosen, _, None)) => output::printed(&list(&chosen)),
        Ok((chosen, required, Some(report))) => {
            let mut run = run(options, &chosen);
            let verdict = required::verdict(&run, &required);
            run.verdicts.extend(verdict);
            report.write(run)
        }
    }
}

/// The selected validations, and names of those that must pass.
type Chosen = (Vec<&'static Validation>, Vec<&'static str>);

fn chosen(options: &Options) -> Result<Chosen, String> {
    let names: Vec<&str> = all().map(|validation| validation.name).collect();
    let chosen = select::select("--select", &names, &options.select)?;
    let required = required::required(&names, &chosen, &options.require, options.strict, core)?;
    Ok((chosen.into_iter().filter_map(find).collect(), required))
}

/// Checks that each argument is one that a validation takes, with a valid value.
fn known(args: &[String]) -> Result<(), String> {
    let arguments = Arguments::from_pairs(args).map_err(|broken| broken.to_string())?;
    let keys = args.iter().filter_map(|arg| Some(arg.split_once('=')?.0));
    if let Some(other) = keys.into_iter().find(|key| !is_argument(key)) {
        return Err(format!(
            "unknown --arg {other}; expected one of: {}",
            argument_names().collect::<Vec<_>>().join(", ")
        ));
    }
    process::deadline(&arguments).map(drop).map_err(|broken| broken.to_string())
}

fn list(chosen: &[&Validation]) -> String {
    let screen = Screen::of_stdout();
    let mut text = String::new();
    for validation in chosen {
        let group = validation.name.split('.').next().and_then(core);
        let mark = if group.is_some_and(|core| core.contains(&validation.name)) { '*' } else { ' ' };
        text.push_str(&format!("{:<28} {mark} {}\n", validation.name, hanging(validation.claim, 31, screen)));
    }
    text
}

/// The document of a run that begins now, as it is given, with what it has found.
pub(super) fn document(given: &Given, verdicts: Vec<Verdict>) -> Run {
    let key = |arg: &str| arg.split_once('=').is_some_and(|(key, _)| is_argument(key));
    Run {
        version: RUN_VERSION,
        date: calendar::now(),
        program: program(),
        seed: given.seed,
        most: given.most,
        args: given.args.iter().filter(|arg| key(arg)).cloned().collect(),
        machine: machine::machine(&Tree::live()),
        verdicts,
    }
}

fn run(options: &Options, chosen: &[&'static Validation]) -> Run {
    let seed = options.seed.unwrap_or_else(random_seed);
    let available = || machine::meminfo(&Tree::live(), "MemAvailable");
    let most = options.size.map_or_else(|| default_size(available()), ByteSize::get);
    let given = Given { name: String::new(), seed, most, args: options.args.clone() };
    let mut run = document(&given, Vec::new());
    let progress = Progress::new(chosen.len());
    for validation in chosen {
        let verdict = process::run(validation, &given, &mut |_| progress.runs(validation.name));
        run.verdicts.push(verdict);
        progress.done();
    }
    run
}

fn program() -> String {
    let linked = if cfg!(target_feature = "crt-static") { "statically" } else { "dynamically" };
    format!("egm-guest {}, linked {linked}", env!("CARGO_PKG_VERSION"))
}

/// A power of two, a sixteenth of what is available.
fn default_size(available: Option<u64>) -> u64 {
    let part = available.unwrap_or(0) / 16;
    let power = part.checked_ilog2().map_or(0, |power| 1u64 << power);
    power.clamp(LEAST, MOST)
}

/// A new seed for a run.
fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    // Without the kernel's randomness, the time: a seed needs to be another one, no more.
    let random = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    let time = || std::time::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos());
    match random {
        Ok(()) => u64::from_le_bytes(bytes),
        Err(_) => u64::try_from(time() & u128::from(u64::MAX)).unwrap_or(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_a_power_of_two_within_bounds() {
        assert_eq!(default_size(None), LEAST);
        assert_eq!(default_size(Some(1000 << 20)), 32 << 20);
        assert_eq!(default_size(Some(u64::MAX)), MOST);
    }

    /// Collects the keys that follow `args.get("` and the like in the source of validations.
    fn asked_for(folder: &std::path::Path, keys: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                asked_for(&path, keys);
                continue;
            }
            let text = std::fs::read_to_string(path).unwrap();
            for call in ["args.get", "args.text"].iter().flat_map(|call| text.split(call).skip(1)) {
                let (before, rest) = call.split_once('"').unwrap();
                let key = rest.split('"').next().unwrap();
                // Not the words of this function.
                let is_key = key.chars().all(|c| c.is_ascii_lowercase() || c == '.');
                if is_key && before.ends_with('(') && before.len() < 40 {
                    keys.push(key.to_owned());
                }
            }
        }
    }

    #[test]
    fn every_argument_that_a_validation_asks_for_is_known() {
        let mut keys = Vec::new();
        asked_for(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/validate"), &mut keys);
        // Keys of the kernel command line, for a run.
        keys.retain(|key| !["json", "size", "seed"].contains(&key.as_str()));
        assert!(keys.len() > 10, "{keys:?}");
        for key in &keys {
            assert!(is_argument(key), "{key} is asked for, and not in ARGUMENTS");
        }
        for known in argument_names().filter(|known| !keys.iter().any(|key| key == known)) {
            assert_eq!(known, "deadline", "nothing asks for {known}");
        }
    }

    #[test]
    fn an_argument_that_nothing_takes_is_refused() {
        let refused = |arg: &str| known(&[arg.to_owned()]).unwrap_err();
        assert!(refused("memory.round=3").contains("memory.rounds"), "{}", refused("memory.round=3"));
        assert!(
            refused("deadline").contains("KEY=VALUE") && refused("deadline=soon").contains("deadline=soon")
        );
        assert_eq!(known(&["deadline=5".into(), "memory.nodes=0,2".into()]), Ok(()));
        assert_eq!(known(&["rdma.timeout=5".into(), "rdma.patience=5".into()]), Ok(()));
    }

    #[test]
    fn a_size_that_no_buffer_has_is_refused() {
        assert_eq!(size("64KiB").map(ByteSize::get), Ok(64 << 10));
        assert!(["0", "63KiB", "x"].iter().all(|text| size(text).is_err()));
    }
}
