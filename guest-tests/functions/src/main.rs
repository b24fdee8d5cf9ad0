//! `egm-function`: serves the test function on a socket, to one client after the other.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use egm_function::config::{Config, Identity, rows};
use egm_function::device::{Function, Setup};
use egm_function::readiness::NEVER;
use egm_vfio_wire::serve::serve;
use egm_vfio_wire::socket::{Connection, Patience};

/// A PCI function for tests, behind vfio-user.
#[derive(Debug, Parser)]
struct Arguments {
    /// Where clients connect; made anew.
    #[arg(long)]
    socket: PathBuf,
    /// Vendor and device: 10de:2342 is a GH200's GPU, 15b3:101e a ConnectX virtual function.
    #[arg(long, default_value = "10de:2342", value_parser = id)]
    id: (u16, u16),
    /// Class, subclass and programming interface: 030200 is a 3D controller, 020000 Ethernet.
    #[arg(long, default_value = "030200", value_parser = class)]
    class: u32,
    /// A text of its configuration space (rows as `010: 0c 00 …`): it has its ids, class and capabilities.
    #[arg(long, conflicts_with_all = ["id", "class"])]
    recorded: Option<PathBuf>,
    /// It is a Grace GPU: 16 MiB of BAR 0 with words that say when it is ready, and NVIDIA's own capability.
    #[arg(long, conflicts_with = "recorded")]
    grace: bool,
    /// How many reads each of these words answers with "not yet" after a reset, or "never" to be ready.
    #[arg(long, requires = "grace", default_value = "3", value_name = "READS", value_parser = reads)]
    ready: u32,
    /// EGM of its socket, a file: addresses with bit 62 are offsets in it, past any IOMMU, to the end of the file.
    #[arg(long, requires = "grace", value_name = "FILE")]
    egm: Option<PathBuf>,
    /// MiB of BAR 2, a power of two.
    #[arg(long, default_value_t = 256, value_parser = mebibytes)]
    bar: u64,
    /// MiB of memory in it.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    memory: u64,
    /// MSI-X vectors.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    vectors: u32,
}

fn id(text: &str) -> Result<(u16, u16), String> {
    let (vendor, device) = text.split_once(':').ok_or("vendor:device in hex, as 10de:2342")?;
    let number = |text| u16::from_str_radix(text, 16).map_err(|error| format!("{text}: {error}"));
    Ok((number(vendor)?, number(device)?))
}

fn class(text: &str) -> Result<u32, String> {
    let class = u32::from_str_radix(text, 16).map_err(|error| error.to_string())?;
    if class < 1 << 24 { Ok(class) } else { Err("six hex digits, as 030200".to_owned()) }
}

fn reads(text: &str) -> Result<u32, String> {
    match text {
        "never" => Ok(NEVER),
        number => number.parse().map_err(|error| format!("{error}; or never")),
    }
}

fn mebibytes(text: &str) -> Result<u64, String> {
    let size: u64 = text.parse().map_err(|error| format!("{error}"))?;
    if size.is_power_of_two() && size <= 1 << 24 {
        Ok(size)
    } else {
        Err("a power of two up to 16777216".to_owned())
    }
}

/// Timeout for the rest of a client's message.
const LIMIT: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(never) => never,
        Err(error) => {
            eprintln!("error: cannot serve {}\n  caused by: {error}", arguments.socket.display());
            ExitCode::from(3)
        }
    }
}

fn run(arguments: &Arguments) -> io::Result<ExitCode> {
    if arguments.memory > arguments.bar {
        eprintln!("error: --memory {} does not fit into --bar {}", arguments.memory, arguments.bar);
        return Ok(ExitCode::from(2));
    }
    let (vendor, device) = arguments.id;
    let setup = Setup {
        identity: Identity { vendor, device, class: arguments.class },
        bar: arguments.bar << 20,
        memory: arguments.memory << 20,
        vectors: arguments.vectors,
    };
    let mut function = match &arguments.recorded {
        None if arguments.grace => Function::grace(setup, arguments.ready)?,
        None => Function::new(setup)?,
        Some(path) => {
            let bytes = rows(&std::fs::read_to_string(path)?);
            let config = bytes.and_then(|bytes| Config::recorded(bytes, setup.bar, setup.vectors));
            let wrong = || format!("{}: rows of bytes with PCI Express, FLR and MSI-X", path.display());
            Function::with(setup, config.ok_or_else(|| io::Error::other(wrong()))?)?
        }
    };
    if let Some(path) = &arguments.egm {
        function = function.with_egm(File::options().read(true).write(true).open(path)?)?;
    }
    match std::fs::remove_file(&arguments.socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&arguments.socket)?;
    println!("serving on {}", arguments.socket.display());
    loop {
        let (socket, _) = listener.accept()?;
        let mut connection = Connection::new(socket.into(), LIMIT, Patience::of(Duration::from_micros(50)))?;
        if let Err(error) = serve(&mut connection, &mut function) {
            let causes = std::iter::successors(std::error::Error::source(&error), |cause| cause.source());
            eprintln!("{}", causes.fold(error.to_string(), |all, cause| format!("{all}: {cause}")));
        }
    }
}
