//! A second opinion: `ib_write_bw` of perftest, on the same device, beside ours.

use std::fs::{DirBuilder, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use egm_guest::findings::Figure;

use super::super::Setting;
use super::site::Site;
use super::speed;
use crate::answer;
use crate::error::Broken;
use crate::finding::{Claim, Finding};

const PROGRAM: &str = "ib_write_bw";
/// Requests of each size unless `rdma.requests` sets another number, such as fewer for an emulator.
const REQUESTS: u32 = 1000;
/// Time limit of one size.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Most that it prints, in bytes.
const MOST: u64 = 1 << 20;

pub(super) fn run(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    if Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        return Ok(Finding::skipped(format!("no {PROGRAM} here: install perftest for a second opinion")));
    }
    let (mut claim, mut figures) = (Claim::default(), Vec::new());
    let requests = setting.args.get("rdma.requests", REQUESTS)?.clamp(5, 1_000_000);
    for size in speed::sizes(setting) {
        match one(site, size, requests)? {
            Ok(result) => {
                claim.equal("the size that it reports", &result.size, &(size as u64));
                claim.holds(result.average > 0.0, || format!("{PROGRAM} measures nothing at {size} bytes"));
                let theirs = result.average / 8.0;
                let ours = speed::write(site, setting, size)?;
                claim.seen(format!("{size} bytes: {theirs:.4} GB/s, ours {ours:.4}"));
                figures.push(Figure::of(PROGRAM, Some(size as u64), "GB/s", &mut [theirs]));
                figures.push(Figure::of("rdma write, beside it", Some(size as u64), "GB/s", &mut [ours]));
            }
            Err(why) => claim.untrue(why),
        }
    }
    claim.seen(format!("{requests} writes of each size by {PROGRAM}"));
    let theirs = figures.iter().filter(|figure| figure.series == PROGRAM);
    let best = theirs.map(|figure| figure.value).fold(0.0, f64::max);
    Ok(claim.finish().with_value(best, "GB/s").with_figures(figures))
}

/// Its result for one size.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Opinion {
    /// Bytes of a request.
    size: u64,
    /// Average bandwidth in Gb/s, as `--report_gbits` has it.
    average: f64,
}

/// A new folder without files of others; it is removed with this value.
struct Folder(PathBuf);

impl Folder {
    /// Made here and now: a folder or link that is there already is not taken.
    fn new() -> Result<Self, Broken> {
        let mut seed = std::process::id();
        loop {
            let random = RandomState::new().hash_one(seed);
            let path = std::env::temp_dir().join(format!("egm-perftest-{random:016x}"));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => seed = seed.wrapping_add(1),
                Err(error) => return Err(Broken::file("make", path)(error)),
            }
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn one(site: &Site<'_>, size: usize, requests: u32) -> Result<Result<Opinion, String>, Broken> {
    let folder = Folder::new()?;
    let file = folder.0.join("result.json");
    let port = free_port()?;
    let start = |there: Option<&str>| {
        let mut command = Command::new(PROGRAM);
        command.args(["-d", &site.name, "-i", &site.place.port.number.to_string()]);
        command.args([
            "-x",
            &site.place.gid.index.to_string(),
            "-s",
            &size.to_string(),
            "-n",
            &requests.to_string(),
        ]);
        command.args(["-p", &port, "-F", "--report_gbits"]);
        if let Some(there) = there {
            command.args(["--out_json", "--out_json_file"]).arg(&file).arg(there);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()
    };
    let failed = || Broken::system(format!("cannot start {PROGRAM}"));
    let mut server = start(None).map_err(|error| failed()(error))?;
    let begun = Instant::now();
    // The server prints nothing when it is ready; a client that comes too early ends at once.
    let result = loop {
        let mut client = start(Some("127.0.0.1")).map_err(|error| failed()(error))?;
        match ended(&mut client) {
            Ok(()) => break Ok(()),
            Err(_) if begun.elapsed() < TIMEOUT && matches!(server.try_wait(), Ok(None)) => {}
            Err(why) => break Err(format!("{PROGRAM} of {size} bytes: {why}")),
        }
    };
    let _ = server.kill();
    let _ = server.wait();
    let mut text = String::new();
    if let Ok(report) = File::open(&file) {
        // A report that is no text has no result in it.
        let _ = report.take(MOST).read_to_string(&mut text);
    }
    Ok(result.and_then(|()| {
        parse(&text).ok_or_else(|| format!("{PROGRAM} of {size} bytes: no result in its report"))
    }))
}

/// Waits for the client; returns its last error line when it fails.
fn ended(client: &mut Child) -> Result<(), String> {
    match answer::ended(client, TIMEOUT) {
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            let mut said = String::new();
            if let Some(errors) = client.stderr.take() {
                let _ = errors.take(MOST).read_to_string(&mut said);
            }
            let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
            Err(format!("{status}: {}", last.chars().take(200).collect::<String>()))
        }
        None => {
            let _ = client.kill();
            let _ = client.wait();
            Err(format!("did not end within {} s", TIMEOUT.as_secs()))
        }
    }
}

/// A TCP port without a listener now, where the program's two ends find each other.
fn free_port() -> Result<String, Broken> {
    let port = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| socket.local_addr());
    Ok(port.map_err(Broken::system("cannot find a free port of TCP"))?.port().to_string())
}

/// The last result of a report. It is not always JSON (versions differ in commas and quotes), so the keys are looked for.
fn parse(text: &str) -> Option<Opinion> {
    let number = |key: &str| {
        let (_, rest) = text.rsplit_once(key)?;
        let rest = rest.trim_start_matches(['"', ':', ' ', '\t']);
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        rest.get(..end)?.parse::<f64>().ok().filter(|number| number.is_finite())
    };
    let size = number("MsgSize")?;
    // A size is a whole number below 2^53.
    let size = format!("{size:.0}").parse().ok()?;
    Some(Opinion { size, average: number("BW_average")? })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// As version 25.01 writes it, and 4.5 with its comma behind the last.
    const REPORTS: [&str; 2] = [
        "{\n\"test_info\": {\n\"test\": \"RDMA_Write_BW_Test\",\n\"Device\": \"rxe0\",\n\"TX_depth\": 128,\n\"Mtu\": 1024\n},\n\"results\": {\n\
         \"MsgSize\": 65536,\n\"n_iterations\": 200,\n\"BW_peak\": 2.103512,\n\"BW_average\": 1.998731,\n\"MsgRate\": 0.003812\n}\n}\n",
        "{\n\"results\": {\nMsgSize: 65536,\nn_iterations: 200,\nBW_peak: 2.10,\nBW_average: 1.998731,\nMsgRate: 0.003812,\n},\n}\n",
    ];

    #[test]
    fn a_folder_is_this_programs_alone_and_goes_with_it() {
        let (one, other) = (Folder::new().unwrap(), Folder::new().unwrap());
        assert_ne!(one.0, other.0);
        assert_eq!(std::fs::metadata(&one.0).unwrap().permissions().mode() & 0o777, 0o700);
        std::fs::write(one.0.join("result.json"), "{}").unwrap();
        let path = one.0.clone();
        drop(one);
        assert!(!path.exists());
    }

    #[test]
    fn a_report_has_size_and_average() {
        for report in REPORTS {
            assert_eq!(parse(report), Some(Opinion { size: 65_536, average: 1.998_731 }));
        }
    }

    #[test]
    fn a_report_without_a_result_is_none() {
        for report in [
            "",
            "{\"MsgSize\": ",
            "{\"MsgSize\": 5}",
            "BW_average MsgSize",
            "\"BW_average\": nan, \"MsgSize\": 1",
        ] {
            assert_eq!(parse(report), None, "{report:?}");
        }
    }
}
