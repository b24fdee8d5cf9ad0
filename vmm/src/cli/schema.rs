//! `egm-vmm schema`: what the files of this program may have in them, for editors and checkers, and the requests of its
//! API, for generators of clients.

use std::process::ExitCode;

use clap::ValueEnum;
use egm_report::show::print;

use crate::api::{Surface, open_api};
use crate::{config, facts};

/// Print the JSON Schema of configurations or facts, or an OpenAPI document
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Subject: configurations, facts of hosts, or one surface of the control API
    #[arg(value_name = "SUBJECT", value_enum, default_value_t = Subject::Machine)]
    subject: Subject,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Subject {
    Machine,
    Facts,
    Api,
    CloudHypervisorApi,
}

pub(super) fn run(args: &Args) -> ExitCode {
    match args.subject {
        Subject::Machine => print(config::schema()),
        Subject::Facts => print(facts::SCHEMA),
        Subject::Api => print(format!("{:#}\n", open_api(Surface::Own))),
        Subject::CloudHypervisorApi => print(format!("{:#}\n", open_api(Surface::CloudHypervisor))),
    }
    ExitCode::SUCCESS
}
