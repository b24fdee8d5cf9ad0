//! `egm-lab run-config`: a machine of the user's own in the emulated PC, with this terminal as its console. The emulated host has this
//! machine's files at their own paths, read-only, so that a configuration and all that it names work as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;

use crate::engine::error::LabError;
use crate::engine::logs;
use crate::hosts::l1::{self, Host};
use crate::hosts::qemu::Clock;
use crate::images::cache::Cache;
use crate::images::emulator;
use crate::images::kernel;
use crate::images::tools::Tools;

/// On the emulated host's command line: the command has its console as a terminal.
const CONSOLE: &str = "lab.console";
/// Mount tag of this machine's files.
const FILES: &str = "host";

/// Arguments of `egm-lab run-config`.
#[derive(Debug, Args)]
pub(crate) struct RunConfigArguments {
    /// Configuration. Its paths are those of this machine, except below /bin, /dev, /egm, /etc, /host, /lib*, /proc, /run,
    /// /sbin, /share, /sys and /var.
    config: PathBuf,
    /// Disk of the configuration that the guest may write. Its whole folder is writable in the emulated host; all other
    /// files are read-only.
    #[arg(long = "disk", value_name = "FILE")]
    disks: Vec<PathBuf>,
    /// Folder for files of the emulated host.
    #[arg(long, value_name = "DIR", default_value = ".lab/run-config")]
    share: PathBuf,
}

/// Runs it to its end; the exit code is that of `egm-vmm run`.
pub(crate) fn run(arguments: &RunConfigArguments) -> Result<ExitCode, LabError> {
    let RunConfigArguments { config, disks, share } = arguments;
    emulator::supported()?;
    let config = absolute(config)?;
    let disks = disks.iter().map(|disk| absolute(disk)).collect::<Result<Vec<_>, _>>()?;
    fs::create_dir_all(share).map_err(LabError::file("make", share))?;
    let cache = Cache::open()?;
    Tools::of_checkout(&cache)?.copy_to(&share.join("tools"))?;
    let here = std::env::current_dir().map_err(LabError::file("find", "the current folder"))?;
    let path = share.join("command");
    fs::write(&path, script(&config, &here, &disks)).map_err(LabError::file("write", &path))?;
    let exit = share.join("exit");
    logs::remove(&exit)?;
    let kernel = kernel::l1(&cache, false)?;
    let host = Host {
        kernel: &kernel,
        cache: &cache,
        plugged: false,
        grace: false,
        wire: false,
        clock: Clock::Real,
        gigantic: false,
    };
    let (mut command, _cards) = l1::emulate(&host, share, CONSOLE)?;
    command.args(export(FILES, Path::new("/"), ",readonly=on"));
    for (number, disk) in disks.iter().enumerate() {
        command.args(export(&tag(number), folder(disk), ""));
    }
    let status = command.status().map_err(LabError::file("run", "QEMU"));
    // Another run of this folder has a command of its own.
    logs::remove(&path)?;
    status?;
    let code = fs::read_to_string(&exit).ok().and_then(|text| text.trim().parse::<u8>().ok());
    code.map(ExitCode::from).ok_or_else(|| LabError::Content {
        what: "the emulated host".into(),
        problem: "it ended before egm-vmm did".into(),
    })
}

fn absolute(path: &Path) -> Result<PathBuf, LabError> {
    path.canonicalize().map_err(LabError::file("find", path))
}

fn folder(disk: &Path) -> &Path {
    disk.parent().unwrap_or_else(|| Path::new("/"))
}

fn tag(number: usize) -> String {
    format!("disk{number}")
}

/// QEMU's arguments for a folder of this machine with the mount tag `tag`.
fn export(tag: &str, folder: &Path, more: &str) -> [String; 4] {
    let path = folder.to_string_lossy().replace(',', ",,");
    [
        "-fsdev".into(),
        format!("local,id={tag},path={path},security_model=none,multidevs=remap{more}"),
        "-device".into(),
        format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
    ]
}

/// Shell script for the emulated host: mounts this machine's files, except over the host's own, and runs the VMM.
fn script(config: &Path, here: &Path, disks: &[PathBuf]) -> String {
    const MOUNT: &str = "mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144";
    let writable: String = disks
        .iter()
        .enumerate()
        .map(|(number, disk)| {
            let folder = quoted(folder(disk));
            format!("mkdir -p {folder} 2> /dev/null\n{MOUNT} {} {folder}\n", tag(number))
        })
        .collect();
    format!(
        "mkdir -p /host\n\
         {MOUNT},ro {FILES} /host\n\
         for entry in /host/*; do\n\
         \x20   at=/${{entry##*/}}\n\
         \x20   case $at in /bin | /dev | /egm | /etc | /host | /init | /lib* | /proc | /run | /sbin | /share | /sys | /var) continue ;; esac\n\
         \x20   if [ -d \"$entry\" ] && [ ! -L \"$entry\" ]; then\n\
         \x20       mkdir -p \"$at\"\n\
         \x20       mount -o bind \"$entry\" \"$at\"\n\
         \x20   elif [ ! -e \"$at\" ]; then\n\
         \x20       ln -s \"$entry\" \"$at\"\n\
         \x20   fi\n\
         done\n\
         {writable}\
         cd {} || exit 4\n\
         exec egm-vmm run {}\n",
        quoted(here),
        quoted(config)
    )
}

/// A word for a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_path_reaches_the_shell_and_qemu_as_it_is() {
        let awkward = Path::new("/a b/it's, too/vm.json");
        let text = script(awkward, Path::new("/a b"), &["/a b/disk.raw".into()]);
        assert!(text.contains(r"exec egm-vmm run '/a b/it'\''s, too/vm.json'"), "{text}");
        assert!(text.contains("disk0 '/a b'\n") && text.contains("cd '/a b' ||"), "{text}");
        let [_, fsdev, _, device] = export("disk0", folder(awkward), "");
        assert!(fsdev.contains("path=/a b/it's,, too,security_model"), "{fsdev}");
        assert_eq!(device, "virtio-9p-pci,fsdev=disk0,mount_tag=disk0");
    }
}
