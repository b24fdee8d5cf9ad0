//! Snapshots: the time to write one, and `vm.restore` until the guest's next instruction.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use egm_fixtures::payload::{Ports, beats};
use serde_json::json;

use super::api::{Server, machine, socket};
use super::figures::{Report, Row, Summary, Target};
use super::monitor::{Monitor, Payload, provided};
use crate::engine::error::LabError;
use crate::engine::logs;
use crate::engine::peer_program::PeerProgram;
use crate::engine::progress::Stage;
use crate::peers::cloud_api::{put, send};

/// Guest memory, of which the guest has written to each page from 16 MiB.
const MIB: u64 = 512;
/// Restores of each monitor in each mode, in turns.
const RESTORES: usize = 15;
/// Snapshots, in turns with a plain copy.
const SNAPSHOTS: usize = 5;
/// Time for one start or restore.
const DEADLINE: Duration = Duration::from_secs(60);
/// What the guest prints when its memory is written, and for ever after that.
const READY: &str = "ready";
const BEAT: &str = ".";
/// When memory is read from the snapshot (`memory_restore_mode`), and in words.
const MODES: [(&str, &str); 2] = [("OnDemand", "memory on demand"), ("Copy", "memory copied")];

/// Times to write a snapshot and to restore it, with the monitors that the user provides.
pub(super) fn run(egm_vmm: &Path, work: &Path, peers: &[PeerProgram]) -> Result<Report, LabError> {
    let end = u32::try_from(MIB << 20).unwrap_or(u32::MAX);
    let payload = Payload::write(work, "beats", &beats(Ports::USUAL, end), MIB)?;
    let saved = |monitor: &Monitor, times| {
        let server = monitor.server()?;
        Some(Saved::write(monitor.name(), server, &payload, work, times))
    };
    let mut report = Report::default();
    let Some(ours) = saved(&Monitor::Egm(egm_vmm.into()), SNAPSHOTS).transpose()? else { return Ok(report) };
    let theirs = provided(peers);
    let theirs: Vec<Saved> = theirs.iter().filter_map(|peer| saved(peer, 1)).collect::<Result<_, _>>()?;
    let name = format!("vm.snapshot of a paused guest, {MIB} MiB in use");
    let row = Row::in_turns(name, "ms", &ours.writes, "its memory file, written and synced", &ours.copies);
    report.rows.extend(row.map(|row| row.should(Target::RatioAtMost(1.1))));
    for (mode, words) in MODES {
        Stage::note(words);
        let name = format!("vm.restore to the next instruction, {MIB} MiB in use, {words}");
        let mut samples = vec![Vec::new(); theirs.len() + 1];
        for _ in 0..RESTORES {
            for (saved, samples) in [&ours].into_iter().chain(&theirs).zip(&mut samples) {
                samples.push(saved.restore(mode, work)?);
            }
        }
        let Some((own, others)) = samples.split_first() else { continue };
        let rows = theirs.iter().zip(others).filter_map(|(saved, samples)| {
            let row = Row::in_turns(name.clone(), "ms", own, saved.name, samples)?;
            Some(row.should(Target::RatioAtMost(1.0)))
        });
        let alone = Summary::of(own).filter(|_| theirs.is_empty());
        report.rows.extend(rows.chain(alone.map(|own| Row::new(name.clone(), "ms", own))));
    }
    Ok(report)
}

/// The snapshot of a paused guest, and the monitor that restores it.
struct Saved {
    /// Name of its monitor.
    name: &'static str,
    server: Server,
    folder: PathBuf,
    /// Milliseconds to write it, and to write its memory file by itself.
    writes: Vec<f64>,
    copies: Vec<f64>,
}

impl Saved {
    /// Starts and pauses `payload`, and writes `times` snapshots of it, the last of which stays.
    fn write(
        name: &'static str,
        server: Server,
        payload: &Payload,
        work: &Path,
        times: usize,
    ) -> Result<Self, LabError> {
        let machine = machine(payload);
        let boot = |socket: &Path| {
            put(socket, "vm.create", Some(&machine))?;
            put(socket, "vm.boot", None)?;
            Ok(Instant::now())
        };
        let mut guest = server.start(work, READY, DEADLINE, boot)?;
        guest.drain();
        let folder = work.join(format!("snapshot of {name}").replace([' ', ','], "-"));
        let socket = socket(work);
        let mut saved = Self { name, server, folder, writes: Vec::new(), copies: Vec::new() };
        put(&socket, "vm.pause", None).map_err(LabError::file("use", &socket))?;
        for _ in 0..times {
            let folder = &saved.folder;
            logs::clear(folder)?;
            fs::create_dir(folder).map_err(LabError::file("make", folder))?;
            let destination = json!({ "destination_url": format!("file://{}", folder.display()) });
            let begun = Instant::now();
            put(&socket, "vm.snapshot", Some(&destination)).map_err(LabError::file("use", &socket))?;
            saved.writes.push(millis(begun));
            if times > 1 {
                saved.copies.push(copied(folder).map_err(LabError::file("copy", folder))?);
            }
        }
        Ok(saved)
    }

    /// Milliseconds from the request of a restore to the guest's next byte.
    fn restore(&self, mode: &str, work: &Path) -> Result<f64, LabError> {
        let body = json!({
            "source_url": format!("file://{}", self.folder.display()),
            "memory_restore_mode": mode,
            "resume": true,
        });
        let mut sent = None;
        let requests = |socket: &Path| {
            let begun = Instant::now();
            sent = Some(send(socket, "vm.restore", Some(&body))?);
            Ok(begun)
        };
        let guest = self.server.start(work, BEAT, DEADLINE, requests);
        // A refusal has the reason why no byte came.
        let refused = sent.map(|sent| sent.accepted()).and_then(Result::err);
        match refused {
            Some(error) => Err(LabError::file("restore", &self.folder)(error)),
            None => Ok(1000.0 * guest?.elapsed.as_secs_f64()),
        }
    }
}

fn millis(begun: Instant) -> f64 {
    1000.0 * begun.elapsed().as_secs_f64()
}

/// Milliseconds to write the bytes of the memory file in `folder` to another one, and to sync it.
fn copied(folder: &Path) -> io::Result<f64> {
    let bytes = fs::read(folder.join("memory"))?;
    let path = folder.join("copy");
    let begun = Instant::now();
    let mut copy = File::create(&path)?;
    copy.write_all(&bytes)?;
    copy.sync_all()?;
    let millis = millis(begun);
    fs::remove_file(path)?;
    Ok(millis)
}
