//! Process 1 of an initramfs: sets up, runs the checks, ends the machine.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use egm_guest::findings::Check;
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::process::WaitOptions;
use rustix::system::RebootCommand;

use crate::cmdline::{End, Orders};
use crate::finding::Finding;
use crate::{PLAN, With, doctor, run, validate};

/// Kernel modules and the order to load them in.
const MODULES: &str = "/egm/modules";

/// Never returns: the machine ends.
pub(crate) fn main() -> ! {
    let mut problems = mount_all();
    problems.extend(open_console());
    let orders = Orders::parse(&fs::read_to_string("/proc/cmdline").unwrap_or_default());
    problems.extend(
        orders.unknown.iter().map(|word| format!("{word:?} on the kernel command line means nothing")),
    );
    // Only emergencies from here on: a kernel message in the middle of a line of ours would spoil it.
    let _ = fs::write("/proc/sys/kernel/printk", "1");
    // The kernel or a boot loader may have left a line open. A quiet kernel does not say that it has come this far.
    println!("\negm-guest runs as init process");
    let modules = load_modules(Path::new(MODULES));

    let mut extra = Vec::new();
    if !problems.is_empty() {
        extra.push(Finding::error(problems.join("; ")).into_check("init", 0));
    }
    if !modules.is_empty() {
        extra.push(Finding::error(modules.join("; ")).into_check("modules", 0));
    }
    report(&orders, &extra);
    if orders.shell {
        shell();
    }
    end(orders.end)
}

/// Runs the checks; prints their lines and the summary.
fn report(orders: &Orders, extra: &[Check]) {
    extra.iter().for_each(run::print_line);
    let names = orders.checks.clone().unwrap_or_else(|| vec!["all".to_owned()]);
    let with = With { plan: PLAN.into(), args: orders.args.pairs().collect() };
    let summary = run::all(&names, &with, |check| {
        run::print_line(check);
        reap();
    });
    let mut good = extra.is_empty() && summary.outcome == egm_guest::findings::Outcome::Passed;
    let validated = validate::on_console(&orders.validate, &orders.args, |check| {
        good &= matches!(
            check.outcome,
            egm_guest::findings::Outcome::Passed | egm_guest::findings::Outcome::Skipped
        );
        run::print_line(check);
        reap();
    });
    let mut reported = 0;
    if orders.doctor {
        reported = doctor::on_console(|check| {
            good &= check.outcome != egm_guest::findings::Outcome::Failed;
            run::print_line(check);
        });
    }
    let more = u32::try_from(extra.len() + validated + reported).unwrap_or(u32::MAX);
    let count = summary.value.unwrap_or(0.0) + f64::from(more);
    run::print_line(&Check { value: Some(count), ..run::summary(0, good) });
}

/// Mounts what the checks read; what is mounted already is fine.
fn mount_all() -> Vec<String> {
    const MOUNTS: [(&CStr, &str, MountFlags); 5] = [
        (c"proc", "/proc", MountFlags::NOSUID),
        (c"sysfs", "/sys", MountFlags::NOSUID),
        (c"devtmpfs", "/dev", MountFlags::NOSUID),
        (c"tmpfs", "/run", MountFlags::NOSUID),
        (c"debugfs", "/sys/kernel/debug", MountFlags::NOSUID),
    ];
    let mut problems = Vec::new();
    for (kind, place, flags) in MOUNTS {
        // Fails on file systems that have their own folders; the mount then reports what is really wrong.
        let _ = fs::create_dir_all(place);
        match rustix::mount::mount(kind, place, kind, flags, None) {
            Ok(()) | Err(Errno::BUSY) => {}
            Err(_) if place == "/sys/kernel/debug" => {} // a kernel may be without it
            Err(error) => problems.push(format!("cannot mount {place}: {error}")),
        }
    }
    problems
}

/// Makes the console standard input and output: the kernel did so only if the initramfs has `/dev/console`.
fn open_console() -> Option<String> {
    let console = match File::options().read(true).write(true).open("/dev/console") {
        Ok(console) => console,
        Err(error) => return Some(format!("cannot open /dev/console: {error}")),
    };
    rustix::stdio::dup2_stdin(&console)
        .and_then(|()| rustix::stdio::dup2_stdout(&console))
        .and_then(|()| rustix::stdio::dup2_stderr(&console))
        .err()
        .map(|error| format!("cannot make the console standard output: {error}"))
}

/// Loads the modules that `order` names; returns what went wrong with which.
fn load_modules(folder: &Path) -> Vec<String> {
    let order = match fs::read_to_string(folder.join("order")) {
        Ok(order) => order,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => return vec![format!("cannot read the module order: {error}")],
    };
    let names = order.lines().map(str::trim).filter(|name| !name.is_empty());
    names.filter_map(|name| load_module(&folder.join(name)).err().map(|e| format!("{name}: {e}"))).collect()
}

/// Loads one module. One that is loaded, or has no hardware in this machine, is fine.
fn load_module(path: &Path) -> io::Result<()> {
    match rustix::system::finit_module(File::open(path)?, c"", 0) {
        Ok(()) | Err(Errno::EXIST | Errno::NODEV) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Collects orphans; no check runs when this is called.
fn reap() {
    while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
}

fn shell() {
    println!("egm-guest: a shell; leave it to end the machine");
    if let Err(error) = Command::new("/bin/sh").env("PATH", "/bin:/sbin:/usr/bin:/usr/sbin").status() {
        println!("egm-guest: no shell: {error}");
    }
}

/// Ends the machine. All output has left it by then, and all written data is on its disks.
fn end(end: End) -> ! {
    let _ = rustix::termios::tcdrain(rustix::stdio::stdout());
    rustix::fs::sync();
    match end {
        End::PowerOff => drop(rustix::system::reboot(RebootCommand::PowerOff)),
        End::Reset => drop(rustix::system::reboot(RebootCommand::Restart)),
        End::Panic => {
            let _ =
                fs::write("/proc/sys/kernel/sysrq", "1").and_then(|()| fs::write("/proc/sysrq-trigger", "c"));
        }
        End::Hang => {}
    }
    loop {
        reap();
        std::thread::sleep(Duration::from_secs(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_without_modules_is_fine_and_a_missing_module_is_named() {
        let folder = std::env::temp_dir().join(format!("egm-guest-modules-{}", std::process::id()));
        assert!(load_modules(&folder).is_empty());
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("order"), "missing.ko\n\n").unwrap();
        let problems = load_modules(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(problems.len(), 1);
        assert!(problems[0].starts_with("missing.ko: "));
    }
}
