"""What is measured once for a model and then given to methods: outlier heads, and how many rows each head needs.

Outlier heads are those whose keys have no similar neighbours and so lose most by clustering (Chelsea section 5.4).
Head shares say how unevenly a budget is spread, `Budget(shares=...)`, with the memory really saved: for methods that
choose rows by attention what AdaKV gives each head on average, for clustering methods more to heads that cluster badly.
Where the model can be asked to repeat a text, the scores of KVzip+ are measured too, and a surrogate is fitted that
predicts them from what enters the attention. Shares of all methods then follow from these scores: a head gets as many
rows as it has among the best of all layers and heads.
All come from plain text, and are written as one file: `.yaml` to read and edit, `.safetensors` with the surrogate too.
"""

from clusterkv_jax.calibration.files import MOST_NUMBERS as MOST_NUMBERS
from clusterkv_jax.calibration.files import fingerprint as fingerprint
from clusterkv_jax.calibration.files import push as push
from clusterkv_jax.calibration.files import read as read
from clusterkv_jax.calibration.files import to_yaml as to_yaml
from clusterkv_jax.calibration.files import write as write
from clusterkv_jax.calibration.measured import PARTS as PARTS
from clusterkv_jax.calibration.measured import SHARE_STEP as SHARE_STEP
from clusterkv_jax.calibration.measured import Calibration as Calibration
from clusterkv_jax.calibration.measured import as_table as as_table
from clusterkv_jax.calibration.measured import choose_outliers as choose_outliers
from clusterkv_jax.calibration.measured import in_steps as in_steps
from clusterkv_jax.calibration.measured import least_scores as least_scores
from clusterkv_jax.calibration.measured import outlier_share as outlier_share
from clusterkv_jax.calibration.measured import with_shares as with_shares
