//! `--from-certificate` and `--from-key`: an operator's own CA signs our roots, so that clients that trust this CA trust the
//! listeners.
//!
//! The key is read for one command. It is neither copied nor printed, and nothing of it goes into the data directory.

use std::fs;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context;
use causeway_certs::{Ca, OperatorCa};

use crate::cli::OperatorCaArgs;
use crate::output::outln;

/// The operator's CA, if it is to sign.
pub(super) fn read(files: &OperatorCaArgs) -> anyhow::Result<Option<OperatorCa>> {
    let (Some(certificate), Some(key)) = (&files.from_certificate, &files.from_key) else {
        return Ok(None);
    };
    // What is no text is told that it is no PEM.
    let text = |path: &Path| {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        anyhow::Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let chain = text(certificate)?;
    // Both may be one file, or what comes on standard input, which reads once.
    let secret = if key == certificate {
        chain.clone()
    } else {
        text(key)?
    };
    let operator = OperatorCa::load(&chain, &secret);
    operator.map(Some).with_context(|| {
        let (certificate, key) = (certificate.display(), key.display());
        format!("{certificate} with {key} cannot sign Causeway's root")
    })
}

/// Says who has signed what, and until when.
pub(super) fn say(ca: &Ca, operator: &OperatorCa) -> anyhow::Result<()> {
    for above in ca.above() {
        let ends = UNIX_EPOCH + Duration::from_secs(above.not_after.as_secs());
        outln!(
            "root {} is signed by {}, until {}",
            above.root,
            above.by,
            humantime::format_rfc3339_seconds(ends)
        )?;
    }
    outln!(
        "callers that trust {} alone believe fronts; edges and tokens go by Causeway's own root, as ever",
        operator.name()
    )?;
    if operator.limits_names() {
        outln!(
            "it says which names may stand below it: nodes and fronts of other names are not believed by it"
        )?;
    }
    Ok(())
}
