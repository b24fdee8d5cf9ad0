//! `egm-device carve grant`: a slice for as long as a command runs.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::atomic::Ordering;

use egm_address::{ByteSize, PciAddress, Printable};
use egm_report::program::Outcome;
use egm_report::{Blame, Remedy, Report};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::Backing;
use crate::broker::{Client, SliceRequest};
use crate::carve::plan::Request;
use crate::cli::access::{cancelled_by_signals, open};
use crate::cli::carve::hold::Holder;
use crate::host::LocalHost;
use crate::ledger::gpus::{claim_named, expect_functions};
use crate::ledger::{GpuLease, Watch};
use crate::owner::Owner;
use crate::progress::with_bar;
use crate::trust;

/// Take a slice, run a command with it, and return it scrubbed
///
/// The environment of the command has the memory's descriptor as EGM_SLICE_FD, and the slice's offset and size in bytes as
/// EGM_SLICE_OFFSET and EGM_SLICE_SIZE. A broker takes its slice back when the command and all processes that inherited the
/// memory have ended.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Region, by name or kind; several are tried in this order
    #[arg(long, value_name = "REGION", required = true)]
    region: Vec<String>,
    /// Size of the slice, such as 64GiB
    #[arg(long, value_name = "SIZE")]
    size: ByteSize,
    /// Alignment of the host physical address [default: the region's page size]
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true)]
    align: ByteSize,
    /// Name of the owner in lists and logs
    #[arg(long, value_name = "NAME", default_value = "carve-grant")]
    name: String,
    /// Get the slice from the broker at this socket (required unless you are root)
    #[arg(long, value_name = "SOCKET")]
    broker: Option<PathBuf>,
    /// VM class that the broker's policy applies to
    #[arg(long, value_name = "CLASS", requires = "broker")]
    class: Option<String>,
    /// Wait until the broker has enough free memory
    #[arg(long, requires = "broker")]
    wait: bool,
    /// Trust domain of the command: owners of one domain share a region that a GPU reaches
    #[arg(long, value_name = "NAME", value_parser = trust::parse_name, conflicts_with = "broker")]
    trust_domain: Option<String>,
    /// GPU that the command opens, such as 0009:01:00.0; its region is then exclusive to the trust domain
    #[arg(long, value_name = "FUNCTION", conflicts_with = "broker")]
    gpu: Vec<PciAddress>,
    #[command(flatten)]
    host: LocalHost,
    /// Command to run, and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// A failure to get a slice, or to run the command.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot grant a slice: no region or kind named {} on this host", .0.join(" or "))]
    NoRegion(Vec<String>),
    #[error("cannot run {command}")]
    Run { command: String, source: io::Error },
}

impl Report for Error {
    fn remedy(&self) -> Remedy {
        Blame::Host.help(match self {
            Self::NoRegion(_) => "egm-device regions lists them",
            Self::Run { .. } => "name a command that exists and that you may run",
        })
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    let status = match &args.broker {
        Some(socket) => {
            let take = SliceRequest {
                name: args.name.clone(),
                regions: args.region.clone(),
                size: args.size.get(),
                align: args.align.get(),
                class: args.class.clone(),
                wait: args.wait,
            };
            let lease =
                Client::connect(socket)?.take(&take, |why| eprintln!("waiting: {}", Printable(why)))?;
            // The broker takes the slice back when the command and its descendants have ended: the holder, which is not
            // ended here, keeps the connection until then.
            let _holder = args.hold(&[lease.connection()])?;
            args.run_with(lease.file(), lease.offset())?
        }
        None => args.run_directly()?,
    };
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

impl Args {
    /// With a slice from this process's own ledger.
    fn run_directly(&self) -> Result<ExitStatus, Box<dyn Report>> {
        let (ledger, survey) = (open(&self.host)?, self.host.survey()?);
        let owner = Owner::this(&self.name).in_domain(self.trust_domain.clone());
        let request = Request { align: self.align.get(), ..Request::new(self.size.get(), owner.clone()) };
        let cancel = cancelled_by_signals();
        let watch = Watch { cancel: &cancel, ..Watch::unobserved() };
        expect_functions(&ledger, &survey.regions, &self.gpu)?;
        let mut refused = None;
        for word in &self.region {
            for region in survey.regions.iter().filter(|region| region.is_called(word)) {
                let watch = Watch { near: survey.near(region), ..watch };
                match with_bar(&region.name, |progress| {
                    ledger.grant(region, &request, &Watch { progress, ..watch })
                }) {
                    Ok(lease) => {
                        let gpus = claim_named(&ledger, &survey.regions, &self.gpu, &owner, &watch)?;
                        let locks = [Some(lease.claim()), gpus.as_ref().map(GpuLease::lock)];
                        let locks: Vec<_> = locks.into_iter().flatten().map(File::as_fd).collect();
                        let holder = self.hold(&locks)?;
                        let status = self.run_with(lease.file(), lease.offset());
                        holder.end().map_err(|source| self.cannot_run(source))?;
                        drop(gpus);
                        // A signal of the terminal was for the command, not for the scrub.
                        cancel.store(false, Ordering::Relaxed);
                        with_bar(&region.name, |progress| lease.return_slice(&Watch { progress, ..watch }))?;
                        return Ok(status?);
                    }
                    Err(error) => refused = refused.or(Some(error)),
                }
            }
        }
        Err(match refused {
            Some(error) => error.into(),
            None => Error::NoRegion(self.region.clone()).into(),
        })
    }

    /// Keeps `descriptors` open as long as the command runs, without giving them to it.
    fn hold(&self, descriptors: &[BorrowedFd<'_>]) -> Result<Holder, Error> {
        Holder::start(descriptors).map_err(|source| self.cannot_run(source))
    }

    fn cannot_run(&self, source: io::Error) -> Error {
        Error::Run { command: self.command.first().cloned().unwrap_or_default(), source }
    }

    fn run_with(&self, file: &File, offset: u64) -> Result<ExitStatus, Error> {
        let (program, arguments) = self.command.split_first().map_or(("", &[][..]), |(p, a)| (p.as_str(), a));
        let error = |source| self.cannot_run(source);
        let memory = file.try_clone().map_err(error)?;
        fcntl_setfd(&memory, FdFlags::empty()).map_err(|errno| error(errno.into()))?; // the command inherits it
        let mut command = Command::new(program);
        command.args(arguments);
        command.env("EGM_SLICE_FD", memory.as_raw_fd().to_string());
        command.env("EGM_SLICE_OFFSET", offset.to_string());
        command.env("EGM_SLICE_SIZE", self.size.get().to_string());
        command.status().map_err(error)
    }
}
