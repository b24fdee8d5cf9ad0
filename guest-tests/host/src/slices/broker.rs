//! `egm-device broker` for scenarios.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::engine::command::output;
use crate::engine::error::LabError;
use crate::engine::step::{Fault, TIMEOUT, eventually};
use crate::runner::machine::Runner;

/// A broker, killed on drop.
pub(crate) struct Broker(Child);

impl Broker {
    /// Starts a broker at `socket` with the rules in `policy`, by default root's, and its log in `report`. It has
    /// granted 2 MiB of `region` once when this returns.
    pub(crate) fn start(
        runner: &Runner,
        region: &str,
        socket: &Path,
        report: &Path,
        policy: Option<&Path>,
    ) -> Result<Self, LabError> {
        let (device, log) = (&runner.tools.device, report.join("broker.log"));
        let errors = File::create(&log).map_err(LabError::file("write", &log))?;
        let mut command = Command::new(device);
        command.arg("broker").arg("--socket").arg(socket).stdin(Stdio::null()).stderr(errors);
        command.args(policy.iter().flat_map(|policy| ["--policy".as_ref(), policy.as_os_str()]));
        let broker = Self(command.spawn().map_err(LabError::file("run", device))?);
        let grants = eventually(TIMEOUT, || {
            let mut client = Command::new(device);
            client.args(["carve", "grant", "--region", region, "--size", "2MiB", "--broker"]);
            let said = output(client.arg(socket).arg("--").arg(&runner.tools.lab).arg("zeros"))?;
            match said.status.success() {
                true => Ok(()),
                false => Err(Fault::Untrue(String::from_utf8_lossy(&said.stderr).into_owned())),
            }
        });
        grants.map_err(|fault| fault.of_lab("a broker that grants"))?;
        Ok(broker)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
