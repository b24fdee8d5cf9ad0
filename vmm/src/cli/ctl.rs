//! `egm-vmm ctl`: a client of a machine's API.

mod error;
mod plug;
mod snapshot;
mod tables;
mod unplug;
mod upgrade;

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use egm_report::program::Outcome;
use egm_report::program::log::Severity;
use egm_report::show::{Screen, Table, Unwritten, print, printable_lines};
use serde_json::{Map, Value, json};

use self::error::{CtlError, STOP, absolute};
use self::plug::{device, plug};
use self::tables::{fields, slices, timings};
use self::unplug::{has_device, unplug};
use super::form::Form;
use crate::api::{Client, ClientError, Events};
use crate::config;
use crate::error::Report;

/// Time for a request that is answered when its effect is there: a start or an end can scrub terabytes.
const LONG: Duration = Duration::from_secs(24 * 3600);

/// Control a machine that was started with --api
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// Socket of the machine's API
    #[arg(long, value_name = "PATH")]
    api: PathBuf,
    /// Print the answer as JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Print version and process
    Ping,
    /// Print name, state, process and configuration
    Machine,
    /// Print processors, memory, payload, state and PCI addresses (JSON)
    Info,
    /// Print mistakes and failures that the virtio devices counted (JSON)
    Counters,
    /// Print the plan of the machine (JSON)
    Plan,
    /// Print region, offset, owner and retired bytes of each slice
    Slices,
    /// Print interrupt lines, and messages that vectors use (JSON)
    Interrupts,
    /// Print the duration of each stage of the start
    Timings,
    /// Print the latest events, one JSON object a line
    Events {
        /// Print later events too, until the machine's program ends
        #[arg(long)]
        follow: bool,
    },
    /// Print numbers in Prometheus' text format
    Metrics,
    /// Print or set the least severity of the program's messages
    LogLevel {
        /// error, warn, info or debug
        #[arg(value_name = "LEVEL", hide_possible_values = true)]
        level: Option<Severity>,
    },
    /// Create a machine in egm-vmm serve; its paths are relative to the working directory of that program
    Create {
        /// Configuration of the machine; "-" is standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        form: Form,
    },
    /// Start the created machine, and wait until its vCPUs run
    Boot,
    /// Start the guest again: egm-vmm serve ends its machine for that, egm-vmm run resets the guest in place
    Reboot,
    /// End the machine, if it runs, and remove its configuration
    Delete,
    /// Press the guest's power button
    PowerButton,
    /// Let the vCPUs wait outside the guest; its devices go on
    Pause,
    /// Let the vCPUs of a paused machine run
    Resume,
    /// Write the state of the paused machine into a folder that has no snapshot (made if missing)
    Snapshot {
        /// Unplug what was plugged in, then pause; the restored machine plugs it in again
        #[arg(long)]
        unplug: bool,
        /// Afterwards plug it in again, and let the machine run [default: it stays paused]
        #[arg(long, requires = "unplug")]
        resume: bool,
        /// Folder of the snapshot
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Make the machine of a snapshot in egm-vmm serve, paused
    Restore {
        /// Folder of the snapshot
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Copy all memory in before the guest runs; by default it is read as the guest touches it
        #[arg(long)]
        prefault: bool,
        /// Let the guest run at once
        #[arg(long)]
        resume: bool,
    },
    /// Have another version of egm-vmm take the running machine over from egm-vmm serve: its guest goes on after a short pause
    Upgrade {
        /// The program [default: the file that egm-vmm serve was started from]
        #[arg(long, value_name = "FILE")]
        program: Option<PathBuf>,
        /// Unplug what was plugged in before, and plug it in again afterwards
        #[arg(long)]
        unplug: bool,
        /// Only check whether the program can have the machine, while the guest runs
        #[arg(long)]
        dry_run: bool,
    },
    /// Plug a device into a spare port of the running machine, and print what the guest finds; its paths are relative to the
    /// working directory of the machine's program
    Plug {
        /// PCI address of a host function, which egm-vmm bind gives to VFIO; or a device as in a configuration:
        /// '{"type": "virtio-blk", "path": "FILE"}'
        #[arg(value_name = "DEVICE", value_parser = device)]
        device: Map<String, Value>,
        /// Name of the device in the machine [default: the first free of its kind: vfio0, blk0, net0, …]
        #[arg(long, value_name = "NAME")]
        id: Option<String>,
        /// GPUDirect clique of an NVIDIA GPU, 0 to 15
        #[arg(long, value_name = "NUMBER")]
        clique: Option<u8>,
        /// Print what the guest would find, and change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Grant a slice to the running machine, plug it in as a device, and print what the guest finds
    PlugSlice {
        /// Regions by name or kind, in the order in which they are tried
        #[arg(value_name = "REGION", required = true)]
        regions: Vec<String>,
        /// Size of the slice, such as 64GiB
        #[arg(long, value_name = "SIZE")]
        size: String,
        /// Guest node nearest to the slice
        #[arg(long, value_name = "NODE", default_value_t = 0)]
        node: u32,
        /// Print what the guest would find, and change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Request a plugged device back from the guest, and wait until the host has it; a slice is also scrubbed and returned
    Unplug {
        /// Name of the device in the machine
        #[arg(value_name = "NAME")]
        id: String,
    },
    /// Press the power button, and end the machine when its guest does not
    Shutdown {
        /// Time for the guest to shut down, in seconds; 0 ends the machine at once
        #[arg(long, value_name = "SECONDS", default_value_t = 60)]
        timeout: u32,
    },
    /// Send a GET request, and print the answer
    Get {
        /// Path of the request, such as /api/v1/vm.info
        #[arg(value_name = "REQUEST")]
        request: String,
    },
    /// Send a PUT request without a body, and print the answer
    Put {
        /// Path of the request, such as /api/v1/vm.power-button
        #[arg(value_name = "REQUEST")]
        request: String,
    },
}

const EXAMPLE: &str = "\
Examples: a machine with an API; its state; its end; machines one after another

  egm-vmm run vm.json --api vm.sock
  egm-vmm ctl --api vm.sock machine
  egm-vmm ctl --api vm.sock shutdown --timeout 30
  egm-vmm serve --api vm.sock
  egm-vmm ctl --api vm.sock create vm.json
  egm-vmm ctl --api vm.sock boot
  egm-vmm ctl --api vm.sock plug '{\"type\": \"virtio-net\", \"tap\": \"tap0\"}'

Exit codes:

  0  the request was carried out
  2  the command line or a configuration is wrong, or the API has no such request or no machine
  3  no API listens at PATH, the request is not built, or the machine cannot do
     it now";

pub(super) fn run(args: &Args) -> Outcome {
    let client = Client::new(&args.api);
    let get = |target: &str| client.ask("GET", target);
    let out = match &args.verb {
        Verb::Ping => return Ok(show(args, &get("/api/v1/vmm.ping")?, fields)),
        Verb::Machine => return Ok(show(args, &get("/egm/v1/machine")?, fields)),
        Verb::Slices => return Ok(show(args, &get("/egm/v1/slices")?, slices)),
        Verb::Timings => return Ok(show(args, &get("/egm/v1/timings")?, timings)),
        Verb::Info => pretty(&get("/api/v1/vm.info")?),
        Verb::Counters => pretty(&get("/api/v1/vm.counters")?),
        Verb::Plan => pretty(&get("/egm/v1/plan")?),
        Verb::Interrupts => pretty(&get("/egm/v1/interrupts")?),
        Verb::Metrics => get("/egm/v1/metrics")?,
        Verb::LogLevel { level: None } => return Ok(show(args, &get("/egm/v1/log-level")?, fields)),
        Verb::LogLevel { level: Some(level) } => {
            let body = json!({ "level": level }).to_string();
            client.ask_with("PUT", "/egm/v1/log-level", body.as_bytes())?
        }
        Verb::Events { follow: false } => get("/egm/v1/events?follow=0")?,
        Verb::Events { follow: true } => return follow(client, &args.api),
        Verb::PowerButton => client.ask("PUT", "/api/v1/vm.power-button")?,
        Verb::Pause => client.ask("PUT", "/api/v1/vm.pause")?,
        Verb::Resume => client.ask("PUT", "/api/v1/vm.resume")?,
        Verb::Snapshot { folder, unplug: true, resume } => {
            snapshot::write(client, &args.api, &absolute(folder)?, *resume)?
        }
        Verb::Snapshot { folder, .. } => {
            let body = json!({ "folder": absolute(folder)? }).to_string();
            client.within(LONG).ask_with("PUT", "/egm/v1/snapshot", body.as_bytes())?
        }
        Verb::Restore { folder, prefault, resume } => {
            let url = format!("file://{}", absolute(folder)?);
            let body = json!({ "source_url": url, "prefault": prefault, "resume": resume });
            client.within(LONG).ask_with("PUT", "/api/v1/vm.restore", body.to_string().as_bytes())?
        }
        Verb::Upgrade { program, unplug, dry_run } => {
            let program = program.as_deref().map(absolute).transpose()?;
            let devices = if *unplug { snapshot::listed(client)? } else { Vec::new() };
            let body = json!({ "program": program, "unplugged": devices }).to_string();
            // What is refused for certain is refused before a device leaves.
            if *dry_run || !devices.is_empty() {
                client.within(LONG).ask_with("PUT", "/egm/v1/upgrade?dry-run=1", body.as_bytes())?;
            }
            match *dry_run {
                true => "the program can have the machine\n".to_owned(),
                false => upgrade::upgrade(client, &args.api, &body, &devices)?,
            }
        }
        Verb::Plug { device, id, clique, dry_run } => {
            let mut device = device.clone();
            device.extend(id.as_deref().map(|id| ("id".to_owned(), id.into())));
            device.extend(clique.map(|clique| ("clique".to_owned(), clique.into())));
            return plug(args, client, "/egm/v1/devices", *dry_run, &Value::Object(device));
        }
        Verb::PlugSlice { regions, size, node, dry_run } => {
            let slice = json!({ "region": regions, "size": size, "node": node, "as": "device" });
            return plug(args, client, "/egm/v1/slices", *dry_run, &slice);
        }
        Verb::Unplug { id } => unplug(client, &args.api, id)?,
        Verb::Create { file, form } => create(client, file, *form)?,
        Verb::Boot => client.within(LONG).ask("PUT", "/api/v1/vm.boot")?,
        Verb::Reboot => client.within(LONG).ask("PUT", "/api/v1/vm.reboot")?,
        Verb::Delete => client.within(LONG).ask("PUT", "/api/v1/vm.delete")?,
        Verb::Shutdown { timeout } => return shutdown(client, *timeout),
        Verb::Get { request } => raw(&client.ask("GET", request)?),
        Verb::Put { request } => raw(&client.within(LONG).ask("PUT", request)?),
    };
    print(for_stdout(out));
    Ok(ExitCode::SUCCESS)
}

/// Sends the configuration of `file`.
fn create(client: Client<'_>, file: &Path, form: Form) -> Result<String, Box<dyn Report>> {
    let text = config::read(file)?;
    let request = if form.is_foreign() { "/api/v1/vm.create" } else { "/egm/v1/machine" };
    Ok(client.ask_with("PUT", request, &text)?)
}

/// `text` for a terminal without control characters, which names of devices may have; otherwise as it came.
fn for_stdout(text: String) -> String {
    if io::stdout().is_terminal() { printable_lines(&text) } else { text }
}

/// Prints `body` as it came with `--json`, otherwise as the table that `view` makes.
fn show(args: &Args, body: &str, view: fn(&Value) -> Table<'static>) -> ExitCode {
    let mut out = String::new();
    match (!args.json).then(|| serde_json::from_str(body).ok()).flatten() {
        // Its cells are printable, and its colours are escape sequences.
        Some(value) => view(&value).write(&mut out, Screen::of_stdout()),
        None => out = for_stdout(raw(body)),
    }
    print(out);
    ExitCode::SUCCESS
}

/// A body with the line end that a terminal needs.
fn raw(body: &str) -> String {
    if body.is_empty() || body.ends_with('\n') { body.to_owned() } else { format!("{body}\n") }
}

fn pretty(body: &str) -> String {
    let value = serde_json::from_str(body).map(|value: Value| format!("{value:#}\n"));
    value.unwrap_or_else(|_| raw(body))
}

/// Prints events until the machine's program ends, or the reader of this output does.
fn follow(client: Client<'_>, path: &Path) -> Outcome {
    let mut events = client.follow()?;
    let mut out = io::stdout();
    while let Some(event) = events.next(None).map_err(|source| unreadable(path, source))? {
        match writeln!(out, "{}", for_stdout(event)).and_then(|()| out.flush()) {
            Ok(()) => {}
            // The reader of this output has seen enough (`| head`).
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
            Err(error) => return Err(Unwritten::from(error).into()),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn unreadable(path: &Path, source: io::Error) -> ClientError {
    ClientError::Unreadable { path: path.to_owned(), source }
}

/// Presses the power button, waits for the machine's end, and requests it after `timeout` seconds.
fn shutdown(client: Client<'_>, timeout: u32) -> Outcome {
    let mut events = client.follow()?; // before the press: no event is missed
    if timeout > 0 {
        match client.ask("PUT", "/api/v1/vm.power-button") {
            Ok(_) if ends_within(client, &mut events, Duration::from_secs(timeout.into()))? => {
                return Ok(ExitCode::SUCCESS);
            }
            // A guest without a button, or that does not shut down.
            Ok(_) | Err(ClientError::Refused { status: 409, .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    match client.within(STOP).ask("PUT", "/api/v1/vm.shutdown") {
        Ok(_) => {}
        Err(ClientError::Refused { status: 409, .. }) if !lacks_vcpus(client) => {} // it ends already
        // egm-vmm serve answers when slices are scrubbed, which can take longer, and not at all where an upgrade began; the
        // events show the machine's end.
        Err(ClientError::Unreadable { .. } | ClientError::Refused { status: 503, .. }) => {}
        Err(error) => return Err(error.into()),
    }
    if ends_within(client, &mut events, STOP)? {
        Ok(ExitCode::SUCCESS)
    } else {
        Err(CtlError::Unstopped.into())
    }
}

fn name(event: &str) -> Option<String> {
    serde_json::from_str::<Value>(event).ok()?["event"].as_str().map(str::to_owned)
}

/// Whether the machine reports its end in `events` within `limit`. The end of the stream is none: another program has taken
/// the machine over, and has its next events; or the machine goes on without its API, or was killed.
fn ends_within(client: Client<'_>, events: &mut Events, limit: Duration) -> Result<bool, ClientError> {
    let until = Instant::now().checked_add(limit);
    loop {
        let mut has_events = false;
        while let Some(event) = events.next(until).map_err(|source| unreadable(client.path(), source))? {
            has_events = true;
            if is_end(&event) {
                return Ok(true);
            }
        }
        if !has_events || until.is_some_and(|until| until <= Instant::now()) {
            return Ok(false);
        }
        match client.follow() {
            Ok(next) => *events = next,
            Err(_) => return Ok(false),
        }
    }
}

/// Whether the machine has no vCPUs to stop yet.
fn lacks_vcpus(client: Client<'_>) -> bool {
    let machine = client.ask("GET", "/egm/v1/machine").ok();
    let machine = machine.and_then(|body| serde_json::from_str::<Value>(&body).ok());
    machine
        .is_some_and(|machine| ["empty", "created", "starting"].iter().any(|name| machine["state"] == *name))
}

/// Whether `event` is the machine's last.
fn is_end(event: &str) -> bool {
    matches!(name(event).as_deref(), Some("stopped" | "failed"))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::tables::plugged;
    use super::*;

    /// Whether the machine's end is found in `streams` of events, one after another.
    fn ends_in(streams: &'static [&str]) -> bool {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            for events in streams {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 1024]).unwrap();
                stream.write_all(format!("HTTP/1.1 200 OK\r\n\r\n{events}").as_bytes()).unwrap();
            }
        });
        let client = Client::new(&path);
        let mut events = client.follow().unwrap();
        let ends = ends_within(client, &mut events, Duration::from_secs(60)).unwrap();
        server.join().unwrap();
        ends
    }

    #[test]
    fn the_end_of_a_machine_is_awaited_over_an_upgrade_too() {
        const PAUSED: &str = "{\"event\":\"paused\"}\n";
        const STOPPED: &str = "{\"event\":\"resumed\"}\n{\"event\":\"stopped\"}\n";
        assert!(ends_in(&[PAUSED, STOPPED]));
        assert!(!ends_in(&[PAUSED, ""]) && !ends_in(&[""]));
    }

    fn rows(table: &Table<'_>) -> Vec<Vec<String>> {
        let mut out = String::new();
        table.write(&mut out, Screen::FILE);
        let words = |line: &str| {
            line.split("  ").map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
        };
        out.lines().skip(1).map(words).collect()
    }

    #[test]
    fn answers_are_tables_of_what_they_have() {
        let machine = serde_json::json!({ "name": "vm1", "ended": null, "pid": 7 });
        assert_eq!(rows(&fields(&machine)), [["name", "vm1"], ["pid", "7"]]);
        let slice = serde_json::json!([{ "id": "egm0", "region": "local", "offset": 4096, "size": 1 << 21,
            "owner": { "name": "vm1", "uid": 0, "pid": 7 }, "retired": [{ "offset": 4096, "size": 1024 }] }]);
        assert_eq!(
            rows(&slices(&slice)),
            [["egm0", "local", "0x1000", "2 MiB", "vm1, user 0, process 7", "1 KiB"]]
        );
        let stages =
            serde_json::json!({ "stages": [{ "stage": "plan", "duration_us": 1500 }], "total_us": 1500 });
        assert_eq!(rows(&timings(&stages)), [["plan", "1.500"], ["total", "1.500"]]);
    }

    #[test]
    fn a_device_is_an_address_or_an_object_and_its_answer_a_row_for_each_part() {
        let function = Value::Object(device("0000:41:00.0").unwrap());
        assert_eq!(function, json!({ "type": "vfio", "function": "0000:41:00.0" }));
        assert_eq!(device(r#"{"type":"virtio-rng"}"#).unwrap().len(), 1);
        for wrong in ["", "41:00", "[]", "{", "disk.img"] {
            assert!(device(wrong).is_err(), "{wrong:?}");
        }
        let answer = json!({ "id": "blk0", "slot": 1, "address": "0000:01:00.0", "msix_vectors": 2,
            "bars": [{ "index": 0, "address": "0x8000000000", "size": 32768 }] });
        assert_eq!(
            rows(&plugged(&answer)),
            [
                ["id", "blk0"],
                ["slot", "1"],
                ["address", "0000:01:00.0"],
                ["BAR 0", "0x8000000000, 32 KiB"],
                ["MSI-X vectors", "2"]
            ]
        );
    }

    #[test]
    fn a_hostile_answer_is_an_empty_table_or_its_text() {
        for value in [Value::Null, serde_json::json!([[[]]]), serde_json::json!({ "stages": 1 })] {
            assert!(rows(&fields(&value)).len() < 2 && rows(&slices(&value)).len() < 2);
            assert_eq!(rows(&plugged(&value)).len(), 4);
            assert_eq!(rows(&timings(&value)).len(), 1);
        }
        assert_eq!(pretty("no JSON"), "no JSON\n");
    }

    /// The requests that `shutdown` sends to a server with these answers, and whether it succeeds.
    fn shut_down(answers: &'static [&'static [u8]]) -> (Vec<String>, bool) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let answered = |answer: &&[u8]| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 1024];
                let count = stream.read(&mut request).unwrap();
                stream.write_all(answer).unwrap();
                String::from_utf8_lossy(&request[..count]).split(" HTTP").next().unwrap().to_owned()
            };
            answers.iter().map(answered).collect()
        });
        let outcome = shutdown(Client::new(&path), 60);
        (server.join().unwrap(), outcome.is_ok())
    }

    #[test]
    fn a_stream_that_ends_is_no_end_of_the_machine() {
        const DONE: &[u8] = b"HTTP/1.1 204 No Content\r\n\r\n";
        let (requests, is_ended) = shut_down(&[b"HTTP/1.1 200 OK\r\n\r\n", DONE, DONE]);
        assert_eq!(
            requests,
            ["GET /egm/v1/events", "PUT /api/v1/vm.power-button", "PUT /api/v1/vm.shutdown"]
        );
        assert!(!is_ended);
    }

    #[test]
    fn only_the_machines_end_is_an_end() {
        assert!(is_end("{\"event\":\"stopped\"}") && is_end("{\"event\":\"failed\"}"));
        assert!(!is_end("{\"event\":\"started\"}") && !is_end("stopped") && !is_end(""));
    }
}
