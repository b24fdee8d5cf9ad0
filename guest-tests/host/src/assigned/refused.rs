//! Scenario: all that can be wrong with a function and its host. The VMM names each fault with its rule and a remedy,
//! exits with 2 (configuration) or 3 (host), and holds nothing afterwards: the same machine then starts.

use std::ffi::OsStr;
use std::fs;
use std::iter;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use egm_fixtures::payload::Ports;
use egm_guest::findings::Check;
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::{Value, json};

use crate::assigned::payload::{devices, payload};
use crate::engine::command::output;
use crate::engine::error::{LabError, chain};
use crate::engine::judge::case;
use crate::engine::logs;
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::scenario::Scenario;
use crate::engine::step::{TIMEOUT, eventually};
use crate::hosts::functions::{bind, free, group, unbind, write};
use crate::runner::machine::Runner;
use crate::runner::refusal::refused;
use crate::runner::steps::{Fault, Step, Steps, timed};

/// Exit codes of the VMM.
const CONFIGURATION: i32 = 2;
const HOST: i32 = 3;
/// A host driver that binds any function it is assigned.
const DRIVER: &str = "uio_pci_generic";
const VFIO: &str = "vfio-pci";
/// An unprivileged user's ID.
const UNPRIVILEGED: u32 = 65534;
/// Memory that an unprivileged user may lock, in KiB: less than a machine has.
const LITTLE: u32 = 1024;
/// A peer's memory: its BAR 2 has 16 MiB and may lie anywhere above memory.
const MEMORY: &str = "0000:00:15.0";
/// The guest prints this when it runs.
const READY: &str = "ready";

/// Runs the scenario for its one function.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let [function] = scenario.assigned else {
        return Err(LabError::Usage(format!("{} needs one function", scenario.name)));
    };
    let Some(group) = group(function) else {
        steps.skip(&format!("this host has no function {function}"));
        return Ok(());
    };
    let file = PathBuf::from(format!("/dev/vfio/{group}"));
    let config =
        payload(runner, scenario, "good", &egm_fixtures::payload::halt(Ports::USUAL), devices(&[function]))?;
    let machines = Machines { runner, scenario, report, function, file, config };
    steps.cases.extend(machines.written_wrong()?);
    steps.cases.extend(machines.had_by_another_driver()?);
    steps.cases.extend(machines.not_permitted()?);
    steps.cases.extend(machines.in_use()?);
    steps.cases.extend(machines.taken_back()?);
    Ok(())
}

struct Machines<'a> {
    runner: &'a Runner,
    scenario: &'a Scenario,
    report: &'a Path,
    function: &'a str,
    /// The VFIO file of the function's group.
    file: PathBuf,
    /// Configuration of a machine with the function that starts.
    config: PathBuf,
}

/// A configuration that is refused.
struct Wrong {
    /// Name of its case.
    name: &'static str,
    /// The keys that make it wrong.
    keys: Value,
    exit: i32,
    /// Parts of the message.
    words: Vec<&'static str>,
}

impl Machines<'_> {
    /// Configurations that no host could satisfy, or not this one.
    fn written_wrong(&self) -> Result<Vec<Check>, LabError> {
        let bar = |place: &str| json!([{ "type": "vfio", "function": MEMORY, "bars": { "2": place } }]);
        let by_iommufd = json!([{ "type": "vfio", "function": self.function, "backend": "iommufd" }]);
        let slice = json!([{ "region": "mem", "size": "32MiB", "node": 1 }]);
        let mut wrong = vec![
            Wrong {
                name: "no such function",
                keys: devices(&["0000:3f:00.0"]),
                exit: HOST,
                words: vec!["0000:3f:00.0 does not exist", "egm-vmm check"],
            },
            Wrong {
                name: "a BAR in memory",
                keys: json!({ "devices": bar("0x1000000") }),
                exit: CONFIGURATION,
                words: vec!["BAR 2 cannot lie at 0x1000000", "\"bars\""],
            },
            Wrong {
                name: "a BAR beyond all addresses",
                keys: json!({ "devices": bar("0x10000000000000") }),
                exit: CONFIGURATION,
                words: vec!["BAR 2 cannot lie at", "guest addresses end at"],
            },
            Wrong {
                name: "a BAR without room",
                keys: json!({ "devices": devices(&[MEMORY])["devices"], "pcie": { "window64": "8MiB" } }),
                exit: CONFIGURATION,
                words: vec![
                    "cannot place device \"vfio0\" in the 64-bit PCI window",
                    "0x1000000 bytes",
                    "\"window64\"",
                ],
            },
            Wrong {
                name: "iommufd without pages",
                keys: json!({ "devices": by_iommufd, "egm": slice }),
                exit: CONFIGURATION,
                words: vec!["iommufd", "region mem", "without struct pages", "\"legacy\""],
            },
        ];
        if !Path::new("/dev/iommu").exists() {
            let words = vec!["/dev/iommu does not exist", "\"backend\": \"legacy\""];
            let keys = json!({ "devices": by_iommufd });
            wrong.push(Wrong { name: "no iommufd", keys, exit: HOST, words });
        }
        wrong.into_iter().map(|wrong| self.refuses(wrong)).collect()
    }

    /// A machine of the configuration `wrong` does not start.
    fn refuses(&self, wrong: Wrong) -> Result<Check, LabError> {
        let Wrong { name, keys, exit, words } = wrong;
        let halt = egm_fixtures::payload::halt(Ports::USUAL);
        let config = payload(self.runner, self.scenario, "wrong", &halt, keys)?;
        Ok(timed(name, || refused(&mut self.machine(&config), exit, &words)))
    }

    /// No driver has the function, or one of the host.
    fn had_by_another_driver(&self) -> Result<Vec<Check>, LabError> {
        let remedy = format!("egm-vmm bind {}", self.function);
        unbind(self.function)?;
        let none = self.refusal("unbound", &["no driver", &remedy]);
        bind(self.function, DRIVER)?;
        let host = self.refusal("bound to another driver", &[DRIVER, &remedy]);
        bind(self.function, VFIO)?;
        Ok(vec![none, host, self.starts("starts when bound", &mut self.machine(&self.config))])
    }

    /// Refuses a user without access to the group, then one with a low memory-lock limit; with a higher one it starts.
    fn not_permitted(&self) -> Result<Vec<Check>, LabError> {
        let kvm = Path::new("/dev/kvm");
        let own = |path: &Path, user| chown(path, Some(user), None).map_err(LabError::file("chown", path));
        own(kvm, UNPRIVILEGED)?;
        let name = self.file.to_string_lossy();
        let words = [&*name, "belongs to user 0", "chown"];
        let denied = timed("not permitted", || refused(&mut self.unprivileged(LITTLE), HOST, &words));
        own(&self.file, UNPRIVILEGED)?;
        // A user can lower the limit but not raise it, so it begins at the maximum.
        let all = Rlimit { current: None, maximum: None };
        setrlimit(Resource::Memlock, all)
            .map_err(|error| LabError::file("raise", "the limit on memory")(error.into()))?;
        let mut named = 0;
        let short = timed("memlock", || {
            let words = ["more bytes of locked memory", "may lock 0x100000", "LimitMEMLOCK="];
            refused(&mut self.unprivileged(LITTLE), HOST, &words)?;
            named = self.named_limit()?;
            refused(&mut self.unprivileged(named.saturating_sub(1)), HOST, &words[..1])
        });
        let enough = self.starts("starts with the limit that was named", &mut self.unprivileged(named));
        own(kvm, 0)?;
        own(&self.file, 0)?;
        Ok(vec![denied, short, enough])
    }

    /// The memory-lock limit that the refusal recommends, in KiB.
    fn named_limit(&self) -> Result<u32, Fault> {
        let said = output(&mut self.unprivileged(LITTLE))?;
        let said = String::from_utf8_lossy(&said.stderr);
        let digits = said.split("ulimit -l ").nth(1).and_then(|rest| rest.split(',').next());
        Ok(digits.ok_or("it names no limit")?.parse()?)
    }

    /// A second machine requests the first one's function, and the refusal names the first.
    fn in_use(&self) -> Result<Vec<Check>, LabError> {
        let mut cases = Vec::new();
        let first = self.machine(&self.config);
        let (ending, _) = self.run(first, |_| {
            let command = self.machine(&self.config);
            let words: Vec<_> = iter::once(command.get_program())
                .chain(command.get_args())
                .map(OsStr::to_string_lossy)
                .collect();
            let holder = format!("({}) has {}", words.join(" "), self.function);
            let file = format!("{} is in use: process ", self.file.display());
            cases.push(self.refusal("had by another machine", &[&file, &holder]));
            Reaction::Terminate
        })?;
        cases.push(ended("the first goes on", ending));
        cases.push(self.starts("starts when free", &mut self.machine(&self.config)));
        Ok(cases)
    }

    /// The host removes the function of a running machine: the VMM reports it and goes on. After a rescan, one starts.
    fn taken_back(&self) -> Result<Vec<Check>, LabError> {
        let folder = Path::new("/sys/bus/pci/devices").join(self.function);
        let mut cases = Vec::new();
        let (ending, _) = thread::scope(|scope| {
            let mut removal = None;
            let ending = self.run(self.machine(&self.config), |log| {
                // The write returns when the machine has released the function.
                removal = Some(scope.spawn(|| write(&folder.join("remove"), "1")));
                cases.push(timed("lost", || prints(log, &format!("requests {} back", self.function))));
                Reaction::Terminate
            });
            if let Some(Ok(Err(error))) = removal.map(thread::ScopedJoinHandle::join) {
                cases.push(case("removed", Some(chain(&error)), 0));
            }
            ending
        })?;
        cases.push(ended("it goes on without", ending));
        let left = folder.exists().then(|| format!("{} is still there", folder.display()));
        cases.push(case("gone", left, 0));
        write(Path::new("/sys/bus/pci/rescan"), "1")?;
        bind(self.function, VFIO)?;
        cases.push(self.starts("starts when found again", &mut self.machine(&self.config)));
        Ok(cases)
    }

    /// The VMM refuses the working configuration with exit code 3, and prints `words`.
    fn refusal(&self, name: &str, words: &[&str]) -> Check {
        timed(name, || refused(&mut self.machine(&self.config), HOST, words))
    }

    fn machine(&self, config: &Path) -> Command {
        self.runner.tools.run(config)
    }

    /// The working machine, started by an unprivileged user with a memory-lock limit of `kib` KiB.
    fn unprivileged(&self, kib: u32) -> Command {
        let mut command = Command::new("sh");
        let script = format!("ulimit -l {kib} && exec \"$0\" run \"$1\"");
        command
            .args(["-c", &script])
            .arg(&self.runner.tools.vmm)
            .arg(&self.config)
            .uid(UNPRIVILEGED)
            .gid(UNPRIVILEGED);
        command
    }

    /// The machine of `command` runs and ends with exit code 0 on SIGTERM; the function is free afterwards.
    fn starts(&self, name: &str, command: &mut Command) -> Check {
        let command = std::mem::replace(command, Command::new("true"));
        timed(name, || match self.run(command, |_| Reaction::Terminate).map_err(|error| chain(&error))? {
            (Some(Ending::Exit(0)), _) => free(self.function),
            (other, log) => {
                let said = fs::read_to_string(log).unwrap_or_default();
                Err(Fault::Untrue(format!("{other:?}: {said}")))
            }
        })
    }

    /// Runs a machine; `then` receives the path of the VMM's log and decides once the guest runs. Returns the ending,
    /// or `None` when the guest never ran, and that path.
    fn run(
        &self,
        command: Command,
        mut then: impl FnMut(&Path) -> Reaction,
    ) -> Result<(Option<Ending>, PathBuf), LabError> {
        let folder = logs::of_next_boot(self.report)?;
        let (console, said) = (folder.join(logs::CONSOLE), folder.join(logs::VMM_LOG));
        let mut ran = false;
        let ending = watch(command, Limit::Total(self.scenario.deadline), &console, &said, |line| {
            ran |= line.contains(READY);
            if line.contains(READY) { then(&said) } else { Reaction::Go }
        })?;
        Ok((ran.then_some(ending), said))
    }
}

/// Waits until the `log` of a running VMM contains `words`.
fn prints(log: &Path, words: &str) -> Step {
    eventually(TIMEOUT, || {
        let said = fs::read_to_string(log)?;
        match said.contains(words) {
            true => Ok(()),
            false => Err(Fault::Untrue(format!("no \"{words}\" in: {said}"))),
        }
    })
}

/// Checks that the machine ran and ended with exit code 0.
fn ended(name: &str, ending: Option<Ending>) -> Check {
    let fault = (ending != Some(Ending::Exit(0))).then(|| format!("{ending:?}, expected exit code 0"));
    case(name, fault, 0)
}
