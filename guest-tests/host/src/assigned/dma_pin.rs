//! Scenario of a pin that outlives its machine: a process keeps a VFIO object of a machine that is killed, so the IOMMU still maps
//! the machine's slice. The slice is quarantined, and the next owner gets zeros once that process has ended.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use egm_fixtures::payload::Ports;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open};

use crate::assigned::confined::{self, UID};
use crate::assigned::payload::payload;
use crate::engine::error::LabError;
use crate::engine::judge::case;
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::scenario::SliceTest;
use crate::hosts::functions::free;
use crate::runner::refusal::{HOST_LACKS, refused};
use crate::runner::steps::{Fault, Step, Steps, timed};
use crate::slices::grant;

const IOMMUFD: &str = "iommufd";
/// Line of the guest once it runs.
const READY: &str = "ready";

/// A machine, and the object of it that is kept.
struct Pin {
    /// Name of its steps.
    name: &'static str,
    region: &'static str,
    backend: &'static str,
    /// Path, or name in `/proc`, of the object.
    object: &'static str,
    /// Whether the machine and the process that keeps the object run as an unprivileged user.
    is_confined: bool,
}

/// A group or device keeps its container with all mappings; an iommufd keeps pages pinned for its next device.
const PINS: [Pin; 4] = [
    Pin { name: "group", region: "mem", backend: "legacy", object: "/dev/vfio/", is_confined: false },
    Pin {
        name: "device",
        region: "mem",
        backend: "legacy",
        object: "anon_inode:[vfio-device]",
        is_confined: true,
    },
    Pin {
        name: "cdev",
        region: "dax0.0",
        backend: IOMMUFD,
        object: "/dev/vfio/devices/",
        is_confined: false,
    },
    Pin { name: "iommufd", region: "dax0.0", backend: IOMMUFD, object: "/dev/iommu", is_confined: true },
];

pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    confined::add_user()?;
    let has_iommufd = steps.scenario.iommufd;
    let mut pins = PINS.iter().filter(|pin| (pin.backend == IOMMUFD) == has_iommufd);
    pins.try_for_each(|pin| run_one(steps, pin))?;
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

fn run_one(steps: &mut Steps<'_>, pin: &Pin) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let [function] = scenario.assigned else {
        return Err(LabError::Usage(format!("{} needs one function", scenario.name)));
    };
    let size = SliceTest::Owned.slice();
    let keys = serde_json::json!({
        "devices": [{ "type": "vfio", "function": function, "backend": pin.backend }],
        "egm": [{ "region": pin.region, "size": size, "node": 1 }],
    });
    let config = payload(runner, scenario, pin.name, &egm_fixtures::payload::halt(Ports::USUAL), keys)?;
    let mut command = runner.tools.run(&config);
    if pin.is_confined {
        command.args(["--user", confined::NAME]);
    }
    let logs = ["console", "vmm"].map(|log| report.join(format!("{}-{log}.log", pin.name)));
    let mut kept = None;
    let [console, said] = &logs;
    let ending = watch(command, Limit::Total(scenario.deadline), console, said, |line| {
        if kept.is_some() || !line.contains(READY) {
            return Reaction::Go;
        }
        kept = Some(Keeper::take(pin));
        Reaction::Go
    })?;
    // The parent of a confined machine reports the signal as a shell does.
    let killed = if pin.is_confined { Ending::Exit(128 + 9) } else { Ending::Signal(9) };
    let fault = (ending != killed).then(|| format!("{ending:?}, not killed"));
    steps.cases.push(case(&format!("killed {}", pin.name), fault, 0));
    let step = |what: &str, step: &mut dyn FnMut() -> Step| timed(&format!("{what} {}", pin.name), step);
    let mut kept = kept.unwrap_or_else(|| Err("the guest did not start".into()));
    let cases = [
        step("busy", &mut || is_busy(pin, function)),
        step("refused", &mut || {
            let mut grant = Command::new(&runner.tools.device);
            grant.args(["carve", "grant", "--region", pin.region, "--size", size, "--", "true"]);
            refused(&mut grant, HOST_LACKS, &["quarantine after"])
        }),
        step("named", &mut || match &kept {
            Ok(keeper) => named(&runner.tools.device, pin, keeper.0.id()),
            Err(Fault::Untrue(why)) => Err(Fault::Untrue(why.clone())),
            Err(Fault::Undecided(why)) => Err(Fault::Undecided(why)),
        }),
        step("scrubbed", &mut || {
            kept = Err("it has ended".into()); // and the object with it
            grant::next_finds_zeros(runner, pin.region, size)
        }),
    ];
    steps.cases.extend(cases);
    Ok(())
}

/// The kernel excludes others from a group while a descriptor of it, or of a device in it, is open.
fn is_busy(pin: &Pin, function: &str) -> Step {
    match free(function) {
        Ok(()) if pin.object != "/dev/iommu" => Err("the kernel has no user of the group".into()),
        _ => Ok(()),
    }
}

/// The ledger names the pin and the process that has it.
fn named(device: &Path, pin: &Pin, keeper: u32) -> Step {
    let states = confined::states(device, pin.region)?;
    let is_it = |evidence: &serde_json::Value| evidence["hold"] == "dma-pin" && evidence["pid"] == keeper;
    let held = states["held"].as_array().into_iter().flatten();
    let mut evidence = held.flat_map(|held| held["evidence"].as_array().into_iter().flatten());
    match evidence.any(is_it) {
        true => Ok(()),
        false => Err(Fault::Untrue(format!("no dma-pin in process {keeper}: {states}"))),
    }
}

/// A process that keeps an object of a machine. It ends with this value.
struct Keeper(Child);

impl Keeper {
    /// Starts it with a descriptor of the running machine, and kills the machine.
    fn take(pin: &Pin) -> Result<Self, Fault> {
        let found = find(pin.object)?.ok_or_else(|| format!("no machine has {}", pin.object))?;
        let machine = Pid::from_raw(found.process).ok_or("no such process")?;
        let process = pidfd_open(machine, PidfdFlags::empty())?;
        let object: OwnedFd = pidfd_getfd(process, found.number, PidfdGetfdFlags::empty())?;
        let mut command = Command::new("cat");
        if pin.is_confined {
            command.uid(UID).gid(UID);
        }
        let keeper = Self(command.stdin(Stdio::piped()).stdout(object).spawn()?);
        kill_process(machine, Signal::KILL)?;
        Ok(keeper)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// A descriptor of a machine.
struct Descriptor {
    process: i32,
    number: i32,
}

/// A machine's descriptor of `object`.
fn find(object: &str) -> Result<Option<Descriptor>, Fault> {
    for process in confined::machines()? {
        for entry in fs::read_dir(confined::folder(process).join("fd"))?.flatten() {
            let target = fs::read_link(entry.path()).unwrap_or_default();
            let number = entry.file_name().to_string_lossy().parse();
            if is_object(&target, object)
                && let Ok(number) = number
            {
                return Ok(Some(Descriptor { process, number }));
            }
        }
    }
    Ok(None)
}

/// Whether a descriptor of `target` is one of `object`. The container's own does not keep its mappings.
fn is_object(target: &Path, object: &str) -> bool {
    let target = target.to_string_lossy();
    target.starts_with(object) && target != "/dev/vfio/vfio"
}
